"""Layouts of the memory that a sidecar shares with engines, byte by byte; little-endian, standard library only."""
