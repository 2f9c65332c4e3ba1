"""The actors together, and the invariants."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from slotcar_sidecar.core.ids import Epoch
from slotcar_sidecar.core.layout import Layout

from tests.property.reader_writer.configurations import Configuration, Event
from tests.property.reader_writer.reader import Reader
from tests.property.reader_writer.rules import Plane, Rules
from tests.property.reader_writer.state import READABLE, Life, State, Step, letter
from tests.property.reader_writer.surroundings import Client, Operators
from tests.property.reader_writer.writer import Writer


class Choices(NamedTuple):
    """Every step that is possible in a state, by who takes it."""

    reader: list[Step]
    writer: list[Step]
    others: list[Step]


class Model:
    """All steps that are possible in a state, and what must hold there.

    By DESIGN's numbers: I1, I2, I3, I4, I7, I8. PINS: a pinned mapping is current and its digest in its slot, so that
    no ordinary eviction can refuse its Forward. STALE: nothing is delivered of a mapping that is stale by then, or that
    a force has ended. SESSION: nor to a session that has ended. PARTS: no kernel starts with the ranks and scales of
    another digest, by which it might read what is not there. PROGRESS: a reader can always step, a writer unless its
    slot is marked, and from every state one can be reached where nobody has anything left to end.
    """

    def __init__(self, configuration: Configuration, rules: Rules) -> None:
        plane, slots, digests, bounds, events = configuration
        self.start = State(Life.new(Epoch("epoch"), slots), bounds)
        self._direct = plane is Plane.DIRECT
        self._writer = Writer(plane, rules, digests, can_fail=Event.FILL_FAILS in events)
        self._reader = Reader(plane, rules)
        self._client = Client(plane, rules)
        self._operators = Operators(plane, rules, events)

    def choices(self, s: State) -> Choices:
        """What may happen next."""
        others = [*self._client.steps(s), *self._operators.steps(s)]
        return Choices(list(self._reader.steps(s)), list(self._writer.steps(s)), others)

    def is_blocked(self, s: State, choices: Choices) -> bool:
        """Whether the reader, or the writer without a mark on its slot, cannot go on."""
        reads = s.forward is not None and (s.up or self._direct)
        writes = s.up and s.fill is not None and s.fill.slot not in s.marks
        return (reads and not choices.reader) or (writes and not choices.writer)

    def is_quiet(self, s: State) -> bool:
        """Whether nobody has anything left to end."""
        return s.up and s.fill is None and s.forward is None

    def broken(self, s: State) -> Iterator[str]:
        """What does not hold in a state."""
        yield from _broken_table(s.layout)
        for slot in s.layout.in_state(*READABLE):
            if letter(s.layout, slot) != s.life.bytes[slot]:
                yield "I1"
        fill, forward = s.fill, s.forward
        if fill and forward and not self._direct:
            meet = self._writer.is_writing(fill) and self._reader.is_reading(forward)
            if meet and fill.slot == forward.mapping.slot:
                yield "I2"
        if s.pinned and not s.can_pin():
            yield "PINS"

    def broken_by(self, s: State, step: Step) -> Iterator[str]:
        """What a step breaks."""
        yield from step.broken
        before, after = s.layout, step.after.layout
        if before is not after and before.epoch == after.epoch and before.generation >= after.generation:
            yield "I3"


@cache
def _broken_table(layout: Layout) -> tuple[str, ...]:
    """I4 and I7, which the table itself asserts."""
    try:
        layout.check_integrity()
    except AssertionError as error:
        return (str(error).partition(":")[0],)
    return ()
