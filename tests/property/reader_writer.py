"""A model of the reader/writer rule (invariant I2), small enough that every interleaving can be visited.

One writer, one reader, one client that maps and sends, operators and the process itself act on one State; each of their
atomic steps is a transition, so whoever does not step is paused. The table of slots is the product's own Layout.

                 first check                  launch            completion       second check
    sent ─mark──▶ marked ──▶ checked ──▶ launched ──read──read──▶ complete ──────▶ delivered or discarded
                                                                                   (the mark ends here)
    chosen ─publish filling──▶ wait until nobody is marked ──▶ write begins ──▶ write ends ──▶ publish occupied

Steps are sequentially consistent, as I2 demands of mark→check and publish→wait; the rules `marks_first` and
`publishes_before_waiting` taken away are what a store buffer would do. A reader in the client's process (DIRECT) has no
mark; it reads the published words of the memory that it has mapped, which stays as it was when its process dies. An
idle mapping and one whose session has ended differ only in that nothing is sent for the second: EXPIRE is the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum
from functools import lru_cache
from typing import NamedTuple

from slotcar_sidecar.core.ids import Digest, Epoch, SlotId
from slotcar_sidecar.core.layout import Layout, SlotState

READS = 2
EMPTY, TORN = "empty", "torn"
DIGESTS = {letter: Digest("sha256:" + letter.lower() * 64) for letter in "ABC"}
LETTERS = {digest: letter for letter, digest in DIGESTS.items()}
READABLE = (SlotState.OCCUPIED, SlotState.DRAINING)


class Plane(Enum):
    """Where the reader is."""

    SIDECAR = "sidecar"
    DIRECT = "direct"


class Do(IntEnum):
    """What the writer and the reader do; the Rules say in which order."""

    PUBLISH = 0
    WAIT = 1
    BEGIN = 2
    END = 3
    OCCUPY = 4
    MARK = 5
    CHECK = 6
    LAUNCH = 7


@dataclass(frozen=True, slots=True)
class Rules:
    """The parts of the rule, each of which can be taken away."""

    # Writer
    fill_sets_mod_generation: bool = True
    publishes_before_waiting: bool = True
    publishes_before_writing: bool = True
    waits_for_marks: bool = True
    occupies_after_writing: bool = True
    respects_pins: bool = True
    one_slot_per_digest: bool = True
    # Reader
    checks_first: bool = True
    marks_first: bool = True
    marks_until_completion: bool = True
    drops_refused_marks: bool = True
    checks_again: bool = True
    checks_again_after_completion: bool = True
    compares_slots: bool = True
    compares_generations: bool = True  # without it digests are compared, which A→C→A passes
    compares_epochs: bool = True
    reads_closed_word: bool = True
    polls_socket: bool = True
    # Session
    sessions_end_with_process: bool = True
    calls_say_generation: bool = True
    mappings_have_own_generation: bool = True
    # Operator and process
    force_sets_mod_generation: bool = True
    restart_is_new_epoch: bool = True
    files_are_new: bool = True

    def without(self, *names: str) -> Rules:
        return replace(self, **dict.fromkeys(names, False))


RULES = tuple(field.name for field in fields(Rules))


class Bounds(NamedTuple):
    """How often each thing may happen in one history, beyond what has happened."""

    fills: int
    maps: int
    sends: int
    events: int


class Life(NamedTuple):
    """What one process has in memory that readers see: the words, and the bytes of the slots."""

    layout: Layout
    bytes: tuple[str, ...]
    closed: bool = False


class Mapping(NamedTuple):
    """What SetMapping reported. The last two are for the checks: did force end it, is its digest back in its slot."""

    digest: str
    slot: SlotId
    epoch: Epoch
    generation: int
    forced: bool = False
    returned: bool = False


class Fill(NamedTuple):
    slot: SlotId
    digest: str
    done: int = 0


class Forward(NamedTuple):
    """A call of the reader; `passed` is the second check's verdict when that came before completion."""

    mapping: Mapping
    expects: str
    done: int = 0
    seen: tuple[str, ...] = ()
    passed: bool | None = None


class State(NamedTuple):
    """Everything. `old` is the memory of a past life that a direct client has still mapped."""

    life: Life
    left: Bounds
    up: bool = True
    fill: Fill | None = None
    mapping: Mapping | None = None
    pinned: bool = False
    marks: frozenset[SlotId] = frozenset()
    forward: Forward | None = None
    connected: bool = True
    old: Life | None = None

    @property
    def layout(self) -> Layout:
        return self.life.layout

    def publish(self, layout: Layout) -> State:
        return self._replace(life=self.life._replace(layout=layout))

    def write(self, slot: SlotId, content: str) -> State:
        old = self.life.bytes
        return self._replace(life=self.life._replace(bytes=(*old[:slot], content, *old[slot + 1 :])))

    def spend(self, **left: int) -> State:
        return self._replace(left=self.left._replace(**left))


class Step(NamedTuple):
    """A transition; `reached` says what is worth knowing about it, `breaks` which invariants it violates."""

    name: str
    after: State
    reached: str = ""
    breaks: tuple[str, ...] = ()


class Model:
    """The steps that each actor can take in a state."""

    def __init__(self, plane: Plane, slots: int, digests: str, bounds: Bounds, rules: Rules) -> None:
        self.direct = plane is Plane.DIRECT
        self.digests = digests
        self.rules = rules
        self.start = State(Life(Layout.empty(Epoch("1"), slots), (EMPTY,) * slots), bounds)
        self._filling = self._writer_order()
        self._writing = range(self._filling.index(Do.BEGIN) + 1, self._filling.index(Do.END) + 1)
        self._opening = self._reader_order()

    def _writer_order(self) -> tuple[Do, ...]:
        order = [Do.BEGIN, Do.END]
        order.insert(1 if not self.rules.occupies_after_writing else 2, Do.OCCUPY)
        order.insert(1 if not self.rules.publishes_before_writing else 0, Do.PUBLISH)
        if self.rules.waits_for_marks:
            early = self.rules.publishes_before_waiting and self.rules.publishes_before_writing
            order.insert(1 if early else 0, Do.WAIT)
        return tuple(order)

    def _reader_order(self) -> tuple[Do, ...]:
        order = [Do.CHECK] if self.rules.checks_first else []
        if not self.direct:
            order.insert(0 if self.rules.marks_first else len(order), Do.MARK)
        return (*order, Do.LAUNCH)

    # The writer

    def writer(self, s: State) -> Iterator[Step]:
        if not s.up:
            return
        if s.fill is None:
            yield from self._choose(s)
            return
        yield from self._fill(s, s.fill)
        if s.left.events and s.layout[s.fill.slot].state is SlotState.FILLING:
            after = s.publish(s.layout.release(s.fill.slot))._replace(fill=None)
            yield Step("the fill fails", after.spend(events=s.left.events - 1))

    def _choose(self, s: State) -> Iterator[Step]:
        """An ordinary eviction: a free slot, or one that nobody pins."""
        if not s.left.fills or s.life.closed:
            return
        for digest in self._distinct(s):
            if self.rules.one_slot_per_digest and s.layout.find(DIGESTS[digest]) is not None:
                continue
            for slot in s.layout.in_state(SlotState.FREE, SlotState.OCCUPIED):
                if not (self.rules.respects_pins and self._is_pinned(s, slot)):
                    chosen = s.spend(fills=s.left.fills - 1)._replace(fill=Fill(slot, digest))
                    for step in self._fill(chosen, Fill(slot, digest)):
                        yield step._replace(name=f"{digest} for slot {slot}: {step.name}")

    def _distinct(self, s: State) -> Iterator[str]:
        """Digests that have left no trace in the state differ in nothing: one of them stands for all."""
        fresh = True
        for digest in self.digests:
            traces = (s.life.bytes, s.old.bytes if s.old else (), s.mapping or (), s.forward or ())
            known = s.layout.find(DIGESTS[digest]) is not None or any(digest in trace for trace in traces)
            known = known or (s.forward is not None and (digest in s.forward.mapping or digest in s.forward.seen))
            if known or fresh:
                yield digest
            fresh = fresh and known

    def _is_pinned(self, s: State, slot: SlotId) -> bool:
        return s.pinned and s.mapping is not None and s.mapping.slot == slot

    def _fill(self, s: State, fill: Fill) -> Iterator[Step]:
        slot, do = fill.slot, self._filling[fill.done]
        ended = fill.done + 1 == len(self._filling)
        after = s._replace(fill=None if ended else fill._replace(done=fill.done + 1))
        if do is Do.PUBLISH:
            if s.layout[slot].state in (SlotState.FREE, SlotState.OCCUPIED):
                yield Step("the writer publishes it filling", after.publish(self._begin_fill(s.layout, fill)))
            else:
                yield Step("the writer gives up", s._replace(fill=None))
        elif do is Do.WAIT:
            if slot not in s.marks:
                yield Step("the writer sees no mark", after)
        elif do is Do.BEGIN:
            yield Step("the write begins", after.write(slot, TORN))
        elif do is Do.END:
            yield Step("the write ends", after.write(slot, fill.digest))
        else:
            yield Step("the writer publishes it occupied", after.publish(s.layout.occupy(slot)))

    def _begin_fill(self, layout: Layout, fill: Fill) -> Layout:
        after = layout.begin_fill(fill.slot, DIGESTS[fill.digest])
        if self.rules.fill_sets_mod_generation:
            return after
        old = replace(after[fill.slot], mod_generation=layout[fill.slot].mod_generation)
        return replace(after, slots=(*after.slots[: fill.slot], old, *after.slots[fill.slot + 1 :]))

    # The reader

    def reader(self, s: State) -> Iterator[Step]:
        forward = s.forward
        if forward is None or not (s.up or self.direct):
            return
        if forward.done < len(self._opening):
            yield self._open(s, forward)
            return
        complete = len(forward.seen) == READS
        if not complete:
            content = self._view(s).bytes[forward.mapping.slot]
            after = s._replace(forward=forward._replace(seen=(*forward.seen, content)))
            yield Step(f"the kernel reads {content}", after)
        early = not self.rules.checks_again_after_completion and self.rules.checks_again
        if complete:
            yield self._finish(s, forward)
        elif early and forward.passed is None:
            passed = not self._objection(s, forward.mapping)
            yield Step("second check, too early", s._replace(forward=forward._replace(passed=passed)))

    def _view(self, s: State) -> Life:
        return s.old or s.life

    def _open(self, s: State, forward: Forward) -> Step:
        do = self._opening[forward.done]
        if forward.done == 0 and not self.direct:
            objection = self._look_up_objection(s, forward.mapping)
            if objection or s.mapping is None:
                return Step("the call is refused", s._replace(forward=None), f"refused: {objection}")
            forward = forward._replace(mapping=s.mapping)
        mapping, after = forward.mapping, s._replace(forward=forward._replace(done=forward.done + 1))
        if do is Do.MARK:
            return Step("the reader marks", after._replace(marks=s.marks | {mapping.slot}))
        if do is Do.LAUNCH:
            return Step("launch", after if self.rules.marks_until_completion else self._unmark(after, mapping))
        objection = self._objection(s, mapping)
        if objection:
            ended = s._replace(forward=None)
            if self.rules.drops_refused_marks:
                ended = self._unmark(ended, mapping)
            return Step("first check refuses", ended, f"first check: {objection}{self._note_refusal(s, mapping)}")
        return Step("first check passes", after if self.direct else self._pin_again(after))

    def _look_up_objection(self, s: State, sent: Mapping) -> str:
        """A Forward names its mapping by session, id and generation; the session has only the newest."""
        mapping = s.mapping
        if mapping is None or (self.rules.sessions_end_with_process and sent.epoch != s.layout.epoch):
            return "a session of another process"
        if self.rules.calls_say_generation and mapping.generation != sent.generation:
            return "the mapping was replaced"
        return ""

    def _objection(self, s: State, mapping: Mapping) -> str:
        """What the check finds, in words; empty when the mapping may be computed."""
        rules, life = self.rules, self._view(s)
        slot = life.layout[mapping.slot]
        if self.direct and rules.polls_socket and not s.connected:
            return "the process is gone"
        if self.direct and rules.reads_closed_word and life.closed:
            return "closed"
        if rules.compares_epochs and life.layout.epoch != mapping.epoch:
            return "another epoch"
        if not rules.compares_slots:
            return ""
        if rules.compares_generations:
            return "" if life.layout.is_current((mapping.slot,), mapping.generation) else "stale"
        return "" if slot.digest == DIGESTS[mapping.digest] and slot.state in READABLE else "another digest"

    def _note_refusal(self, s: State, mapping: Mapping) -> str:
        """What another rule would have accepted."""
        slot = self._view(s).layout[mapping.slot]
        if slot.mod_generation <= mapping.generation and slot.digest not in (None, DIGESTS[mapping.digest]):
            return ", equal generations"
        if slot.state is SlotState.OCCUPIED and slot.digest == DIGESTS[mapping.digest]:
            return ", equal digests"
        return ""

    def _unmark(self, s: State, mapping: Mapping) -> State:
        return s._replace(marks=s.marks - {mapping.slot})

    def _finish(self, s: State, forward: Forward) -> Step:
        """The kernel has completed: the second check, and the result or nothing leaves."""
        mapping = forward.mapping
        after = self._unmark(s._replace(forward=None), mapping)
        objection = "" if forward.passed is not None or not self.rules.checks_again else self._objection(s, mapping)
        if objection or forward.passed is False:
            read = "torn" if TORN in forward.seen else "other" if {*forward.seen} != {forward.expects} else "good"
            noted = f"second check: {objection}, {read} bytes read{self._note_refusal(s, mapping)}"
            return Step("second check discards", after, noted)
        waiting = s.fill and s.fill.slot in s.marks and self._filling[s.fill.done] is Do.WAIT
        note = "delivered, a writer waited" if waiting else self._note_delivery(s, mapping)
        return Step("delivered", after, note, tuple(self._delivery_faults(s, forward)))

    def _delivery_faults(self, s: State, forward: Forward) -> Iterator[str]:
        mapping = forward.mapping
        if any(content != forward.expects for content in forward.seen):
            yield "I8"
        if not s.up or mapping.epoch != s.layout.epoch or not (s.connected and s.old is None):
            yield "I3"
        if mapping.forced or not self._view(s).layout.is_current((mapping.slot,), mapping.generation):
            yield "STALE"

    def _note_delivery(self, s: State, mapping: Mapping) -> str:
        if mapping.returned:
            return "delivered, the digest came back"
        state = self._view(s).layout[mapping.slot].state
        return f"delivered, slot {state.value}" + ("" if s.pinned else ", no pins")

    # The client

    def client(self, s: State) -> Iterator[Step]:
        if s.left.maps and s.up and not s.life.closed and s.connected:
            for slot in s.layout.in_state(*READABLE):
                # A digest without a name is for the session that pins it.
                if s.layout[slot].state is SlotState.OCCUPIED or self._is_pinned(s, slot):
                    yield self._map(s, slot)
        if s.mapping is not None and s.left.sends and s.forward is None and (s.up or self.direct):
            forward = Forward(s.mapping, s.mapping.digest)
            yield Step("a call is sent", s.spend(sends=s.left.sends - 1)._replace(forward=forward))
        if self.direct and not s.connected and s.up and s.forward is None:
            yield Step("the client attaches anew", s._replace(connected=True, old=None))
        if self.direct and s.connected and s.up and self._pin_again(s) is not s:
            yield Step("the client pins again", self._pin_again(s))

    def _map(self, s: State, slot: SlotId) -> Step:
        before, layout = s.mapping, s.layout
        digest = LETTERS[layout[slot].digest or DIGESTS["A"]]
        returned = False
        if before is not None and before.epoch == layout.epoch:
            if self.rules.mappings_have_own_generation and layout.generation <= before.generation:
                layout = layout.advance()
            same = before.digest == digest and before.slot == slot
            returned = same and not layout.is_current((slot,), before.generation)
        after = s if self._is_pinned(s, slot) else self._end_pins(s.publish(layout))
        mapping = Mapping(digest, slot, layout.epoch, layout.generation, returned=returned)
        after = after.publish(layout) if after.layout.generation < layout.generation else after
        return Step(f"{digest} is mapped", after.spend(maps=s.left.maps - 1)._replace(mapping=mapping, pinned=True))

    def _end_pins(self, s: State) -> State:
        """What only the mapping pinned, and no name has, is freed."""
        ended = s._replace(pinned=False)
        if s.pinned and s.mapping is not None and s.layout[s.mapping.slot].state is SlotState.DRAINING:
            return ended.publish(s.layout.release(s.mapping.slot))
        return ended

    def _pin_again(self, s: State) -> State:
        """An idle mapping's next use takes its pins again, if it is current and its slot is still its digest's."""
        mapping, layout = s.mapping, s.layout
        if s.pinned or mapping is None or mapping.epoch != layout.epoch:
            return s
        slot = layout[mapping.slot]
        current = layout.is_current((mapping.slot,), mapping.generation)
        if current and slot.state in READABLE and slot.digest == DIGESTS[mapping.digest]:
            return s._replace(pinned=True)
        return s

    # Operators, time and the process

    def others(self, s: State) -> Iterator[Step]:
        if not s.up:
            yield Step("a new process starts", self._restart(s))
            return
        if s.life.closed:
            yield Step("the process exits", self._exit(s))
            return
        for slot in s.layout.in_state(*READABLE):
            if s.left.events:
                yield Step(f"slot {slot} is unloaded by force", self._force(s, slot))
            if s.left.events and s.layout[slot].state is SlotState.OCCUPIED:
                drains = self._is_pinned(s, slot)
                layout = s.layout.drain(slot) if drains else s.layout.release(slot)
                yield Step(f"slot {slot} is unloaded", s.publish(layout).spend(events=s.left.events - 1))
            if s.left.fills and s.layout[slot].state is SlotState.DRAINING:
                after = s.publish(s.layout.revive(slot)).spend(fills=s.left.fills - 1)
                yield Step(f"slot {slot} is loaded again", after)
        if s.left.events and s.pinned:
            yield Step("the pins end", self._end_pins(s).spend(events=s.left.events - 1))
        if s.left.events:
            yield Step("the process is killed", self._exit(s.spend(events=s.left.events - 1)))
            if self.direct:
                closed = s._replace(life=s.life._replace(closed=True))
                yield Step("the process closes", closed.spend(events=s.left.events - 1))

    def _force(self, s: State, slot: SlotId) -> State:
        sets = self.rules.force_sets_mod_generation
        after = s.publish(s.layout.invalidate(slot) if sets else s.layout.release(slot))
        after = after.spend(events=s.left.events - 1)._replace(pinned=s.pinned and not self._is_pinned(s, slot))
        if s.mapping is not None:
            after = after._replace(mapping=self._forced(s, s.mapping, slot))
        if s.forward is not None:
            after = after._replace(forward=s.forward._replace(mapping=self._forced(s, s.forward.mapping, slot)))
        return after

    def _forced(self, s: State, mapping: Mapping, slot: SlotId) -> Mapping:
        ends = mapping.slot == slot and mapping.epoch == s.layout.epoch
        return mapping._replace(forced=True) if ends and s.layout[slot].digest == DIGESTS[mapping.digest] else mapping

    def _exit(self, s: State) -> State:
        """The process is gone; what has arrived there is too. A call that has not may reach the next process."""
        arrived = s.forward is not None and s.forward.done > 0 and not self.direct
        forward = None if arrived else s.forward
        gone = s._replace(up=False, fill=None, pinned=False, marks=frozenset(), forward=forward)
        return gone._replace(connected=False) if self.direct else gone

    def _restart(self, s: State) -> State:
        count = len(s.layout.slots)
        epoch = Epoch(str(int(str(s.layout.epoch)) + 1)) if self.rules.restart_is_new_epoch else s.layout.epoch
        stays = self.direct and self.rules.files_are_new
        old = (s.old or s.life) if stays else None
        return s._replace(life=Life(Layout.empty(epoch, count), (EMPTY,) * count), up=True, old=old)

    # What holds in every state

    def faults(self, s: State) -> Iterator[str]:
        """The names of the invariants that do not hold. I3 and I8 belong to steps."""
        yield from _table_faults(s.layout)
        for index in s.layout.in_state(*READABLE):
            if s.layout[index].digest != DIGESTS.get(s.life.bytes[index]):
                yield "I1"
        fill, forward = s.fill, s.forward
        if fill and forward and not self.direct and fill.done in self._writing and fill.slot == forward.mapping.slot:
            in_flight = forward.done == len(self._opening) and len(forward.seen) < READS
            if in_flight:
                yield "I2"
        if s.pinned and (s.mapping is None or self._pin_again(s._replace(pinned=False)).pinned is False):
            yield "PINS"

    def is_quiet(self, s: State) -> bool:
        """Nobody has anything left to end."""
        return s.up and s.fill is None and s.forward is None

    def must_step(self, s: State) -> tuple[bool, bool]:
        """Whether the reader and the writer may not be blocked: a reader never, a writer only by a mark."""
        reads = s.forward is not None and (s.up or self.direct)
        writes = s.up and s.fill is not None and s.fill.slot not in s.marks
        return reads, writes


@lru_cache(maxsize=None)
def _table_faults(layout: Layout) -> tuple[str, ...]:
    try:
        layout.check_integrity()
    except AssertionError as error:
        return (str(error).partition(":")[0],)
    return ()
