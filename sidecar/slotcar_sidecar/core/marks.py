"""Who reads which slot right now: a reader marks itself first, then checks the layout (invariant I2).

The owner's thread marks its readers in sets. Another thread has one Mark, which it alone writes and the owner reads:
the owner publishes a slot as changing before it looks at the mark, the thread marks before it looks at the layout, so
one of them sees the other. That needs writes and reads in one order for all, which the interpreter's lock gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from slotcar_sidecar.core.ids import SlotId

_NOTHING: frozenset[SlotId] = frozenset()


class Mark:
    """What one thread reads and for whom, and whether the owner waits for it to end.

    `readings` is how many it has begun so far. `ended` is called by the thread when a reading that the owner waits for
    is over; it must be safe in any thread.
    """

    __slots__ = ("_ended", "awaited", "reader", "readings", "slots")

    def __init__(self, ended: Callable[[], object]) -> None:
        self.reader: object | None = None
        self.readings = 0
        self.slots = _NOTHING
        self.awaited = False
        self._ended = ended

    def begin(self, reader: object, slots: frozenset[SlotId]) -> None:
        """The thread reads `slots` from now on; only what it looks up afterwards tells whether it may."""
        self.readings += 1
        self.reader = reader
        self.slots = slots

    def end(self) -> None:
        """The thread reads nothing any more."""
        self.slots = _NOTHING
        self.reader = None
        if self.awaited:
            self.awaited = False
            self._ended()


class Marks:
    """Sets of readers by slot, and what to do when the last of them is gone. Only the owner's thread calls it."""

    def __init__(self) -> None:
        self._readers: dict[SlotId, set[object]] = defaultdict(set)
        self._threads: set[Mark] = set()
        self._when_unread: dict[SlotId, list[Callable[[], None]]] = defaultdict(list)
        self._when_ended: list[tuple[Callable[[Mark], bool], Callable[[], None]]] = []

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
            self.look(slots)

    def add(self, mark: Mark) -> None:
        """A thread reads slots from now on."""
        self._threads.add(mark)

    def remove(self, mark: Mark) -> None:
        """The thread has ended."""
        self._threads.discard(mark)
        self.look()

    def is_read(self, slot: SlotId) -> bool:
        return bool(self._readers[slot]) or any(_reads(slot, mark) for mark in self._threads)

    def when_unread(self, slot: SlotId, call: Callable[[], None]) -> None:
        """Calls once when nobody reads the slot; at once if nobody does now."""
        self._when_unread[slot].append(call)
        self.look((slot,))

    def when_ended(self, reader: object, call: Callable[[], None]) -> None:
        """Calls once when what threads read for `reader` now has ended, whatever they begin for it meanwhile."""
        now = {mark: mark.readings for mark in self._threads if mark.reader is reader}
        self._when_ended.append((partial(_still_reads, now), call))
        self.look(())

    def look(self, slots: Iterable[SlotId] | None = None) -> None:
        """Calls what waits for slots, by default all, that nobody reads now, and for readings that have ended."""
        for slot in tuple(self._when_unread) if slots is None else slots:
            waiting = self._when_unread.get(slot) and not self._readers[slot]
            if waiting and not self._await(partial(_reads, slot)):
                for call in self._when_unread.pop(slot):
                    call()
        for waiting_for in tuple(self._when_ended):
            reads, call = waiting_for
            if not self._await(reads):
                self._when_ended.remove(waiting_for)
                call()

    def _await(self, reads: Callable[[Mark], bool]) -> bool:
        """Whether a thread reads so; it was asked to tell when it ends, and then looked at once more."""
        for mark in filter(reads, self._threads):
            mark.awaited = True
        return any(map(reads, self._threads))


def _reads(slot: SlotId, mark: Mark) -> bool:
    return slot in mark.slots


def _still_reads(readings: Mapping[Mark, int], mark: Mark) -> bool:
    """Whether the mark's reading is the one of that number."""
    return mark.reader is not None and readings.get(mark) == mark.readings
