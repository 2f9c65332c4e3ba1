"""What the Forwards of the direct plane keep for each mapping, and what it is to the caller when a slot has changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from slotcar_kernels.guard import Change

from slotcar_client.errors import LayoutStale, MappingNotFound, ShapeMismatch, SlotcarError
from slotcar_client.transports.cells import ConnectionLost
from slotcar_client.transports.shared_slots import SharedSlots
from slotcar_client.values import Mapping

__all__ = ["PerMapping", "check_counts", "error_of", "keep"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_MOST_MAPPINGS = 64
_LOST = {
    Change.CLOSED: "the sidecar has closed its slots",
    Change.OTHER_EPOCH: "the slots are those of another epoch",
    Change.DISCONNECTED: "the sidecar ended the connection",
    Change.GONE: "the sidecar is gone",
}


def keep(made: dict[K, T], key: K, value: T, most: int) -> T:
    """Keeps the value with those that are kept, at most so many, the newest."""
    made.pop(key, None)
    while len(made) >= most:
        del made[next(iter(made))]
    made[key] = value
    return value


class PerMapping(Generic[T]):
    """One T for each of the newest mappings, as they were set last."""

    def __init__(self, slots: SharedSlots) -> None:
        self._slots = slots
        self._made: dict[int, tuple[Mapping, T]] = {}

    def of(self, mapping: Mapping, make: Callable[[SharedSlots, Mapping], T]) -> T:
        """Raises MappingNotFound for a mapping of another epoch, and what `make` raises."""
        found = self._made.get(mapping.mapping_id)
        if found is not None and found[0] is mapping:
            return found[1]
        if mapping.version.epoch != self._slots.connection.epoch:
            raise MappingNotFound(
                f"mapping {mapping.mapping_id} is of another life of the server: set it again",
                mapping_id=mapping.mapping_id,
            )
        self._made.pop(mapping.mapping_id, None)  # first, so that its memory goes
        made = make(self._slots, mapping)
        return keep(self._made, mapping.mapping_id, (mapping, made), _MOST_MAPPINGS)[1]


def check_counts(mapping: Mapping, row_counts: tuple[int, ...]) -> None:
    """Raises ShapeMismatch unless there is one for each entry."""
    if len(row_counts) != len(mapping.slots):
        found, wanted = f"{len(row_counts)} counts", f"{len(mapping.slots)} counts"
        message = f"row_counts is {found}, wanted {wanted}"
        raise ShapeMismatch(message, field="row_counts", found=found, wanted=wanted)


def error_of(change: Change, slots: SharedSlots, mapping: Mapping) -> SlotcarError:
    """What the change is to the caller; after ConnectionLost another connection may do."""
    if not change.is_stale:
        return ConnectionLost(_LOST[change])
    changed = slots.changed_after(mapping.generation)
    stale = [str(entry) for entry, slot in zip(mapping.entries, mapping.slots, strict=True) if slot in changed]
    return LayoutStale(
        f"a slot of mapping {mapping.mapping_id} changed after generation {mapping.generation}: map again by digest",
        entries=", ".join(dict.fromkeys(stale)),
        found=slots.generation,
        wanted=mapping.generation,
    )
