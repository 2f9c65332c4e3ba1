"""Pure values and rules of slotcar: standard library only, no clock, no I/O, no threads."""
