"""Which slot gives way to a new adapter."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from slotcar_sidecar.core.ids import SlotId


def least_recently_used(candidates: Collection[SlotId], last_used: Mapping[SlotId, int]) -> SlotId | None:
    """The candidate whose last use is the longest ago, the lowest index among equals; None without candidates."""
    return min(candidates, key=lambda slot: (last_used.get(slot, 0), slot), default=None)
