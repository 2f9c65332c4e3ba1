"""A vLLM engine whose adapters are the sidecar's: nothing here is imported unless vLLM is."""
