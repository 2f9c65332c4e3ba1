"""Who reads which slot right now: a reader marks itself first, then checks the layout (invariant I2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from slotcar_sidecar.core.ids import SlotId


class Marks:
    """Sets of readers by slot, and what to do when the last of them is gone. Only the owner's thread calls it."""

    def __init__(self) -> None:
        self._readers: dict[SlotId, set[object]] = defaultdict(set)
        self._when_unread: dict[SlotId, list[Callable[[], None]]] = defaultdict(list)

    @contextmanager
    def reading(self, slots: Iterable[SlotId]) -> Iterator[None]:
        """The caller reads `slots` while the context is open."""
        slots, reader = tuple(slots), object()
        for slot in slots:
            self._readers[slot].add(reader)
        try:
            yield
        finally:
            for slot in slots:
                self._readers[slot].discard(reader)
                if not self._readers[slot]:
                    for call in self._when_unread.pop(slot, ()):
                        call()

    def is_read(self, slot: SlotId) -> bool:
        return bool(self._readers[slot])

    def when_unread(self, slot: SlotId, call: Callable[[], None]) -> None:
        """Calls once when nobody reads the slot; at once if nobody does now."""
        if self.is_read(slot):
            self._when_unread[slot].append(call)
        else:
            call()
