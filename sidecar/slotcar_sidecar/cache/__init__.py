"""The single owner of all mutable state, in parts: what is shared, loads, mappings with holds, and the computation."""

from slotcar_sidecar.cache.owner import AdapterCache

__all__ = ["AdapterCache"]
