"""From a source to verified host tensors: sources, the PEFT format and the host tier."""
