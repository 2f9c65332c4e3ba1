"""slotcar in a real vLLM, which has an environment of its own: make test-vllm."""
