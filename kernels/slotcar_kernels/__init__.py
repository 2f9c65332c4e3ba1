"""Punica kernels: LoRA for rows of several adapters at once, in the sidecar and in engines that run them in process."""
