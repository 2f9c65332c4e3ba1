"""Remote sources against real endpoints on this machine."""
