"""From a caller's entries to slots, and from row counts to rows; never by inference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slotcar_sidecar.core.errors import LayoutStale, ShapeMismatch
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.ids import AdapterRef, Digest, Epoch, SlotId
from slotcar_sidecar.core.layout import Layout


@dataclass(frozen=True, slots=True)
class Entry:
    """What one entry resolved to; `ref` has the digest, `needs_base` is the adapter's."""

    ref: AdapterRef
    digest: Digest
    slot: SlotId
    needs_base: bool = False


@dataclass(frozen=True, slots=True)
class Mapping:
    """Ordered entries (None is the base model), resolved at (epoch, generation)."""

    mapping_id: int
    entries: Folded[Entry | None]
    epoch: Epoch
    generation: int
    slots: frozenset[SlotId] = field(init=False)

    def __post_init__(self) -> None:
        used = frozenset(entry.slot for entry in self.entries.table if entry is not None)
        object.__setattr__(self, "slots", used)

    @property
    def refs(self) -> Folded[AdapterRef | None]:
        """What each entry resolved to, as name@digest; None for the base model."""
        return self.entries.map(lambda entry: entry.ref if entry else None)

    @property
    def digests(self) -> tuple[str, ...]:
        """One digest per entry, empty for the base model, as Forward reports them."""
        return tuple(self.entries.map(lambda entry: entry.digest.value if entry else ""))

    def check_generation(self, generation: int) -> None:
        """Raises LayoutStale unless the caller believes the mapping to have the generation that it has."""
        if generation != self.generation:
            raise LayoutStale(
                f"mapping {self.mapping_id} has generation {self.generation}, the call says {generation}",
                entries=tuple(self._names(self.entries.table)),
                found=generation,
                wanted=self.generation,
            )

    def check_current(self, layout: Layout) -> None:
        """Raises LayoutStale, listing the entries at fault, unless the mapping may be computed at `layout`."""
        if layout.epoch == self.epoch and layout.is_current(self.slots, self.generation):
            return
        stale = [
            entry
            for entry in self.entries.table
            if entry is not None
            and (layout.epoch != self.epoch or not layout.is_current((entry.slot,), self.generation))
        ]
        if stale:
            names = tuple(self._names(stale))
            raise LayoutStale(
                f"a slot of mapping {self.mapping_id} changed after generation {self.generation}: map again by digest",
                entries=names,
                found=layout.generation,
                wanted=self.generation,
            )

    @staticmethod
    def _names(entries: Iterable[Entry | None]) -> dict[str, None]:
        """Each adapter once, as name@digest."""
        return dict.fromkeys(str(entry.ref) for entry in entries if entry is not None)

    def rows(self, row_counts: Sequence[int]) -> tuple[tuple[SlotId | None, int], ...]:
        """(slot, number of rows) per entry, None for the base model. Raises ShapeMismatch (invariant I5)."""
        if len(row_counts) != len(self.entries):
            raise ShapeMismatch("row_counts", found=f"{len(row_counts)} counts", wanted=f"{len(self.entries)} counts")
        slots = self.entries.map(lambda entry: entry.slot if entry else None)
        return tuple(zip(slots, row_counts, strict=True))
