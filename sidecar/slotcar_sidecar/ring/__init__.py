"""The planes in shared memory: each client has a region of its own, and a thread of the sidecar that serves it."""
