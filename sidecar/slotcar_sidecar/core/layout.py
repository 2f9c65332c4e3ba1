"""The immutable table slot → state and digest, at one version.

Every change is a new table with the next generation. A change that writes a slot's bytes, or may have to before long
(a forced unload), also sets the slot's `mod_generation` to that generation:

    free ──begin_fill──▶ filling ──occupy──▶ occupied ──drain──▶ draining
     ▲                      │                 │    ▲                │ │
     ├──────release─────────┘◀─────release────┘    └─────revive─────┘ │
     └───────────────────────release, invalidate──────────────────────┘

A slot that is taken for another digest goes straight to filling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from slotcar_sidecar.core.ids import Digest, Epoch, SlotId


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"
    OCCUPIED = "occupied"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Slot:
    """One row of the table."""

    state: SlotState = SlotState.FREE
    digest: Digest | None = None
    mod_generation: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """All slots at (epoch, generation)."""

    epoch: Epoch
    generation: int
    slots: tuple[Slot, ...]
    _by_digest: dict[Digest, SlotId] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table = {slot.digest: SlotId(index) for index, slot in enumerate(self.slots) if slot.digest is not None}
        object.__setattr__(self, "_by_digest", table)

    @classmethod
    def empty(cls, epoch: Epoch, count: int) -> Layout:
        return cls(epoch, 1, (Slot(),) * count)

    def __getitem__(self, slot: SlotId) -> Slot:
        return self.slots[slot]

    def find(self, digest: Digest) -> SlotId | None:
        """The slot that holds the digest or is being filled with it (invariant I4: there is at most one)."""
        return self._by_digest.get(digest)

    def in_state(self, *states: SlotState) -> tuple[SlotId, ...]:
        return tuple(SlotId(index) for index, slot in enumerate(self.slots) if slot.state in states)

    def is_current(self, slots: Iterable[SlotId], generation: int) -> bool:
        """Whether no slot's bytes began to change after `generation`."""
        for slot in slots:  # noqa: SIM110 - runs twice in each Forward, and `all` takes twice the time
            if self.slots[slot].mod_generation > generation:
                return False
        return True

    def begin_fill(self, slot: SlotId, digest: Digest) -> Layout:
        return self._changed(slot, set(SlotState) - {SlotState.FILLING}, SlotState.FILLING, digest, writes=True)

    def occupy(self, slot: SlotId) -> Layout:
        return self._changed(slot, {SlotState.FILLING}, SlotState.OCCUPIED, self.slots[slot].digest)

    def drain(self, slot: SlotId) -> Layout:
        return self._changed(slot, {SlotState.OCCUPIED}, SlotState.DRAINING, self.slots[slot].digest)

    def revive(self, slot: SlotId) -> Layout:
        return self._changed(slot, {SlotState.DRAINING}, SlotState.OCCUPIED, self.slots[slot].digest)

    def release(self, slot: SlotId) -> Layout:
        """Frees a slot without a write: mappings that used it stay valid until something is written there."""
        return self._changed(slot, set(SlotState) - {SlotState.FREE}, SlotState.FREE, None)

    def invalidate(self, slot: SlotId) -> Layout:
        """Frees a slot and makes every mapping that used it stale at once."""
        return self._changed(slot, {SlotState.OCCUPIED, SlotState.DRAINING}, SlotState.FREE, None, writes=True)

    def advance(self) -> Layout:
        """The same slots at the next generation."""
        return replace(self, generation=self.generation + 1)

    def _changed(
        self, slot: SlotId, before: set[SlotState], after: SlotState, digest: Digest | None, *, writes: bool = False
    ) -> Layout:
        old = self.slots[slot]
        assert old.state in before, f"slot {slot} is {old.state.value}, cannot become {after.value}"
        generation = self.generation + 1
        new = Slot(after, digest, generation if writes else old.mod_generation)
        return Layout(self.epoch, generation, (*self.slots[:slot], new, *self.slots[slot + 1 :]))

    def check_integrity(self) -> None:
        """Asserts I4, I7 and that free slots, and only they, have no digest."""
        counts = Counter(slot.state for slot in self.slots)
        assert sum(counts[state] for state in SlotState) == len(self.slots), "I7"
        digests = [slot.digest for slot in self.slots if slot.digest is not None]
        assert len(digests) == len(set(digests)), "I4: a digest is in two slots"
        for slot in self.slots:
            assert (slot.digest is None) == (slot.state is SlotState.FREE), slot
            assert slot.mod_generation <= self.generation, slot
