"""Who protects which slot: sets of owners, never counters, so that nothing can drift."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from slotcar_sidecar.core.ids import SessionId, SlotId


@dataclass(frozen=True, slots=True)
class MappingOwner:
    """A mapping of a session, as the owner of pins."""

    session: SessionId
    mapping_id: int
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.session, self.mapping_id)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class HoldOwner:
    """A hold of a session, as the owner of a digest's bytes and, inside its reservation, of a pin."""

    session: SessionId
    hold_id: int


PinOwner = MappingOwner | HoldOwner


@dataclass(frozen=True, slots=True)
class Pins:
    """slot → owners. Slots without an owner are absent."""

    owners: Mapping[SlotId, frozenset[PinOwner]] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, slot: SlotId) -> frozenset[PinOwner]:
        return self.owners.get(slot, frozenset())

    def by(self, owner: PinOwner) -> frozenset[SlotId]:
        """The slots that `owner` pins."""
        return frozenset(slot for slot, owners in self.owners.items() if owner in owners)

    def pinned(self) -> frozenset[SlotId]:
        return frozenset(self.owners)

    def replace(self, owner: PinOwner, slots: Iterable[SlotId]) -> Pins:
        """`owner` pins exactly `slots` from now on. Idempotent."""
        wanted, alone = frozenset(slots), frozenset({owner})
        table = {slot: owners | alone if slot in wanted else owners - alone for slot, owners in self.owners.items()}
        table |= dict.fromkeys(wanted - table.keys(), alone)
        return Pins(MappingProxyType({slot: owners for slot, owners in table.items() if owners}))

    def without(self, gone: Collection[PinOwner]) -> Pins:
        """The owners `gone` pin nothing any more."""
        gone = frozenset(gone)
        table = {slot: owners - gone for slot, owners in self.owners.items()}
        return Pins(MappingProxyType({slot: owners for slot, owners in table.items() if owners}))

    def end(self, slot: SlotId) -> Pins:
        """Nobody pins `slot` any more."""
        return Pins(MappingProxyType({other: owners for other, owners in self.owners.items() if other != slot}))
