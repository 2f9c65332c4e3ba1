"""The writer: an ordinary eviction, and the fill of the slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slotcar_sidecar.core.layout import Layout, SlotState

from tests.property.reader_writer.rules import Act, Plane, Rules
from tests.property.reader_writer.state import DIGESTS, EMPTY, TORN, Fill, State, Step


class Writer:
    """The steps that it can take."""

    def __init__(self, plane: Plane, rules: Rules, digests: str, *, can_fail: bool) -> None:
        self._rules = rules
        self._digests = digests
        self._can_fail = can_fail
        self._acts = rules.writer_acts(plane)
        self._begun = self._acts.index(Act.BEGIN_WRITE) + 1
        self._ended = self._acts.index(Act.END_WRITE) + 1

    def steps(self, s: State) -> Iterator[Step]:
        if not s.up:
            return
        if s.fill is None:
            yield from self._choose(s)
            return
        yield from self._go_on(s, s.fill)
        if self._can_fail and s.left.events and s.layout[s.fill.slot].state is SlotState.FILLING:
            failed = s.publish(s.layout.release(s.fill.slot))._replace(fill=None)
            yield Step("the fill fails", failed.after_event())

    def is_writing(self, fill: Fill) -> bool:
        return self._begun <= fill.done < self._ended

    def _choose(self, s: State) -> Iterator[Step]:
        """Any digest for any slot that is free, or that nobody pins."""
        if not s.left.fills or s.life.closed:
            return
        for digest in self._distinct_digests(s):
            for slot in s.layout.in_state(SlotState.FREE, SlotState.OCCUPIED):
                if not (self._rules.respects_pins and s.pins(slot)):
                    fill = Fill(slot, digest)
                    for step in self._go_on(s._replace(left=s.left._replace(fills=s.left.fills - 1)), fill):
                        yield step._replace(name=f"slot {slot} for {digest}: {step.name}")
                if s.life.bytes[slot] == EMPTY and s.layout[slot].mod_generation == 0:
                    break  # slots that were never used differ in nothing

    def _distinct_digests(self, s: State) -> Iterator[str]:
        """Digests in no slot; of those that have left no trace, which differ in nothing, the first."""
        traces = {*s.life.bytes, *(s.old.bytes if s.old else ()), s.mapping.digest if s.mapping else ""}
        traces |= {*s.life.parts, *(s.old.parts if s.old else ()), s.kept[1] if s.kept else ""}
        if s.forward is not None:
            traces |= {*s.forward.seen, s.forward.expected, s.forward.mapping.digest, s.forward.parts}
        untraced = 0
        for digest in self._digests:
            taken = s.layout.find(DIGESTS[digest]) is not None
            untraced += not taken and digest not in traces
            if not (taken and self._rules.one_slot_per_digest) and (digest in traces or untraced == 1 or taken):
                yield digest

    def _go_on(self, s: State, fill: Fill) -> Iterator[Step]:
        slot, act = fill.slot, self._acts[fill.done]
        ended = fill.done + 1 == len(self._acts)
        after = s._replace(fill=None if ended else fill._replace(done=fill.done + 1))
        if act is Act.SEE_NO_MARK:
            if slot not in s.marks:
                yield Step("the writer sees no mark", after)
        elif act is Act.WRITE_WORD:
            yield Step("the word is written", after.write_word(slot, s.layout[slot].mod_generation))
        elif act is Act.WRITE_PARTS:
            yield Step("the parts are written", after.write_parts(slot, fill.digest))
        elif act is Act.BEGIN_WRITE:
            yield Step("the write begins", after.write(slot, TORN))
        elif act is Act.END_WRITE:
            yield Step("the write ends", after.write(slot, fill.digest))
        elif act is Act.PUBLISH_OCCUPIED:
            yield Step("the writer publishes occupied", after.publish(s.layout.occupy(slot)))
        elif s.layout[slot].state in (SlotState.FREE, SlotState.OCCUPIED):
            published = after.publish(self._begin_fill(s.layout, fill))
            if Act.WRITE_WORD in self._acts:
                published = published.write_word(slot, s.life.words[slot] if self._rules.writes_word_whole else 0)
            yield Step("the writer publishes filling", published)
        else:  # only where it is published late
            yield Step("the writer gives up", s._replace(fill=None))

    def _begin_fill(self, layout: Layout, fill: Fill) -> Layout:
        slot, after = fill.slot, layout.begin_fill(fill.slot, DIGESTS[fill.digest])
        if self._rules.fill_sets_mod_generation:
            return after
        unchanged = replace(after[slot], mod_generation=layout[slot].mod_generation)
        return replace(after, slots=(*after.slots[:slot], unchanged, *after.slots[slot + 1 :]))
