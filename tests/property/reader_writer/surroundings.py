"""Everybody else: the client that maps and calls, operators, time, and the life and death of the process."""

from __future__ import annotations

from collections.abc import Iterator

from slotcar_sidecar.core.ids import Epoch, SlotId
from slotcar_sidecar.core.layout import SlotState

from tests.property.reader_writer.configurations import Event
from tests.property.reader_writer.rules import Plane, Rules
from tests.property.reader_writer.state import READABLE, Forward, Life, Mapping, State, Step, letter


class Client:
    """The steps that an engine's session takes beside its calls."""

    def __init__(self, plane: Plane, rules: Rules) -> None:
        self._direct = plane is Plane.DIRECT
        self._rules = rules

    def steps(self, s: State) -> Iterator[Step]:
        if s.up and s.connected and not s.life.closed and not s.ended:
            if s.left.maps:
                yield from self._map_any(s)
            if self._direct and not s.pinned and s.can_pin():
                yield Step("the client pins again", s._replace(pinned=True))
        if s.mapping is not None and s.left.calls and s.forward is None and (s.up or self._direct):
            called = s._replace(left=s.left._replace(calls=s.left.calls - 1))
            yield Step("a call is sent", called._replace(forward=self._forward(s, s.mapping)))
        if s.up and not s.connected and s.forward is None:
            mapping = None if s.ended else s.mapping  # a new session has none
            attached = s._replace(connected=True, old=None, ended=False, kept=None, mapping=mapping)
            yield Step("the client attaches anew", attached)

    def _forward(self, s: State, mapping: Mapping) -> Forward:
        if not self._direct:
            return Forward(mapping, mapping.digest)
        if s.kept is None or s.kept[0] != mapping.slot:
            return Forward(mapping, mapping.digest, reads_parts=True)
        return Forward(mapping, mapping.digest, parts=s.kept[1])

    def _map_any(self, s: State) -> Iterator[Step]:
        """By digest; a draining one has no name, and is for the session that pins it."""
        for slot in s.layout.in_state(*READABLE):
            if s.layout[slot].state is SlotState.OCCUPIED or s.pins(slot):
                yield Step(f"{letter(s.layout, slot)} is mapped", self._map(s, slot))

    def _map(self, s: State, slot: SlotId) -> State:
        """Resolves and pins in one step; what only the mapping before pinned may be freed by it."""
        before, layout, digest = s.mapping, s.layout, letter(s.layout, slot)
        returned = False
        if before is not None and before.epoch == layout.epoch:
            if self._rules.mapping_has_own_generation and layout.generation <= before.generation:
                layout = layout.advance()
            same = (before.digest, before.slot) == (digest, slot)
            returned = same and not layout.is_current((slot,), before.generation)
        mapping = Mapping(digest, slot, layout.epoch, layout.generation, returned=returned)
        after = s.publish(layout) if s.pins(slot) else s.publish(layout).end_pins()
        if self._rules.reads_parts_for_each_mapping:
            after = after._replace(kept=None)
        return after._replace(mapping=mapping, pinned=True, left=s.left._replace(maps=s.left.maps - 1))


class Operators:
    """The steps of operators, of time and of the process itself."""

    def __init__(self, plane: Plane, rules: Rules, events: frozenset[Event]) -> None:
        self._direct = plane is Plane.DIRECT
        self._events = events
        self._rules = rules

    def steps(self, s: State) -> Iterator[Step]:
        if not s.up:
            yield Step("a new process starts", self._start(s))
        elif s.life.closed:
            yield self._exit(s, "the process exits")
        else:
            for slot in s.layout.in_state(SlotState.DRAINING):
                if s.left.fills:
                    revived = s.publish(s.layout.revive(slot))
                    yield Step(
                        f"slot {slot} is revived", revived._replace(left=s.left._replace(fills=s.left.fills - 1))
                    )
            if s.ended and s.connected:
                yield Step("the session's socket is closed", s._replace(connected=False))
            if s.left.events:
                yield from (step for event, step in self._any_event(s) if event in self._events)

    def _any_event(self, s: State) -> Iterator[tuple[Event, Step]]:
        for slot in s.layout.in_state(*READABLE):
            yield Event.FORCE, Step(f"slot {slot} is unloaded by force", self._force(s, slot).after_event())
        for slot in s.layout.in_state(SlotState.OCCUPIED):
            layout = s.layout.drain(slot) if s.pins(slot) else s.layout.release(slot)
            yield Event.UNLOAD, Step(f"slot {slot} is unloaded", s.publish(layout).after_event())
        if s.pinned:
            yield Event.EXPIRE, Step("the pins end", s.end_pins().after_event())
        if self._direct and not s.ended and s.connected:
            yield Event.END, Step("the session ends", s.end_pins()._replace(ended=True).after_event())
        yield Event.KILL, self._exit(s.after_event(), "the process is killed")
        if self._direct:
            closed = s._replace(life=s.life._replace(closed=True))
            yield Event.CLOSE, Step("the process closes", closed.after_event())

    def _force(self, s: State, slot: SlotId) -> State:
        sets = self._rules.force_sets_mod_generation
        after = s.publish(s.layout.invalidate(slot) if sets else s.layout.release(slot))
        after = after._replace(pinned=s.pinned and not s.pins(slot))
        if s.mapping is not None:
            after = after._replace(mapping=_force_mapping(s, s.mapping, slot))
        if s.forward is not None:
            after = after._replace(forward=s.forward._replace(mapping=_force_mapping(s, s.forward.mapping, slot)))
        return after

    def _exit(self, s: State, name: str) -> Step:
        """A call that has arrived there dies with it; one that has not may reach the next process."""
        dies = s.forward is not None and s.forward.done > 0 and not self._direct
        after = s._replace(up=False, fill=None, pinned=False, marks=frozenset(), connected=not self._direct)
        reached = ["killed under a Forward"] * dies + ["killed in a fill"] * (s.fill is not None)
        return Step(name, after._replace(forward=None if dies else s.forward), tuple(reached))

    def _start(self, s: State) -> State:
        before = s.layout.epoch
        epoch = Epoch(f"{before}'") if self._rules.restart_is_new_epoch else before
        old = s.view if self._direct and self._rules.restart_makes_new_files else None
        return s._replace(life=Life.new(epoch, len(s.layout.slots)), up=True, old=old)


def _force_mapping(s: State, mapping: Mapping, slot: SlotId) -> Mapping:
    ended = (mapping.epoch, mapping.slot, mapping.digest) == (s.layout.epoch, slot, letter(s.layout, slot))
    return mapping._replace(forced=True) if ended else mapping
