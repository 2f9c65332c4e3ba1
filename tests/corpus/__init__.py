"""Adapters of every kind that PEFT writes, each with what slotcar makes of it: PEFT's numbers, or a refusal."""
