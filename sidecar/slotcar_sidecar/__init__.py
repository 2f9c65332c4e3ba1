"""The slotcar sidecar process: owns adapter slots and computes their LoRA for the engines beside it."""
