"""Thin integrations: how an inference engine's layers get their LoRA from a session."""
