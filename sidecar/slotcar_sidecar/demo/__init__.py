"""The `slotcar demo` command: a real host model, adapters and a sidecar on one machine."""
