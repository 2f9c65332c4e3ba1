"""The reader: a Forward in the sidecar, or a unit of a direct client."""

from __future__ import annotations

from collections.abc import Iterator

from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import Layout

from tests.property.reader_writer.rules import Act, Plane, Rules
from tests.property.reader_writer.state import READABLE, TORN, Forward, Mapping, State, Step, letter


class Reader:
    """The steps that it can take."""

    def __init__(self, plane: Plane, rules: Rules) -> None:
        self._direct = plane is Plane.DIRECT
        self._rules = rules
        self._acts = {reads: rules.reader_acts(plane, reads_parts=reads) for reads in (False, True)}

    def steps(self, s: State) -> Iterator[Step]:
        forward = s.forward
        if forward is None or not (s.up or self._direct):
            return
        if forward.done < len(self._acts[forward.reads_parts]):
            yield self._open(s, forward)
            return
        if forward.complete:
            yield self._finish(s, forward)
            return
        content = s.view.bytes[forward.mapping.slot]
        yield Step(f"the kernel reads {content}", s._replace(forward=forward._replace(seen=(*forward.seen, content))))
        if self._rules.checks_again and not self._rules.checks_again_after_completion and forward.passed is None:
            passed = not self._objection(s, forward.mapping)
            yield Step("the second check is made", s._replace(forward=forward._replace(passed=passed)))

    def is_reading(self, forward: Forward) -> bool:
        return forward.done == len(self._acts[forward.reads_parts]) and not forward.complete

    def _open(self, s: State, forward: Forward) -> Step:
        act = self._acts[forward.reads_parts][forward.done]
        if forward.done == 0 and not self._direct:
            unknown = self._why_unknown(s, forward.mapping)
            if unknown or s.mapping is None:
                reached = _refused("no mapping", unknown, s.layout, forward.mapping)
                return Step(f"refused: {unknown}", s._replace(forward=None), reached)
            forward = forward._replace(mapping=s.mapping)
        mapping, after = forward.mapping, s._replace(forward=forward._replace(done=forward.done + 1))
        if act is Act.MARK:
            return Step("the reader marks", after._replace(marks=s.marks | {mapping.slot}))
        if act is Act.READ_PARTS:
            return self._read_parts(s, after, mapping.slot)
        if act is Act.LAUNCH:
            broken = ("PARTS",) if self._direct and forward.parts != forward.expected else ()
            after = after if self._rules.marks_until_completion else after.unmark(mapping.slot)
            return Step("launched", after, broken=broken)
        objection = self._objection(s, mapping, polls=act is not Act.CHECK)
        check = "first check" if act is Act.CHECK else "check of the parts"
        if objection:
            ended = s._replace(forward=None)
            reached = _refused(check, objection, s.view.layout, mapping)
            ended = ended.unmark(mapping.slot) if self._rules.unmarks_when_refused else ended
            return Step(f"the {check} refuses: {objection}", ended, reached)
        if act is Act.CHECK_PARTS:
            return Step("the parts are kept", after._replace(kept=(mapping.slot, forward.parts)))
        # An idle mapping's next Forward takes its pins again; a direct client does that through the ring.
        pins = not self._direct and mapping == s.mapping and s.can_pin()
        return Step("the first check passes", after._replace(pinned=s.pinned or pins))

    def _read_parts(self, s: State, after: State, slot: SlotId) -> Step:
        parts, forward = s.view.parts[slot], after.forward
        assert forward is not None
        kept = s.kept if self._rules.checks_parts else (slot, parts)
        return Step(f"the parts of {parts} are read", after._replace(forward=forward._replace(parts=parts), kept=kept))

    def _why_unknown(self, s: State, sent: Mapping) -> str:
        """A call names its mapping by session, id and generation; under an id a session has its newest mapping only."""
        mapping = s.mapping
        if mapping is None or (self._rules.session_ends_with_process and sent.epoch != s.layout.epoch):
            return "session of another process"
        if self._rules.call_says_generation and mapping.generation != sent.generation:
            return "replaced"
        return ""

    def _objection(self, s: State, mapping: Mapping, *, polls: bool = True) -> str:
        """Why a check fails; empty when the mapping may be computed."""
        rules, life = self._rules, s.view
        over = self._direct and self._is_over(s, polls=polls)
        if over:
            return over
        if rules.compares_epochs and life.layout.epoch != mapping.epoch:
            return "another epoch"
        if not rules.compares_slots:
            return ""
        if rules.compares_generations:
            word = life.words[mapping.slot] + (not rules.takes_equal_generations)
            return "" if word <= mapping.generation else "stale"
        readable = life.layout[mapping.slot].state in READABLE
        return "" if readable and letter(life.layout, mapping.slot) == mapping.digest else "another digest"

    def _is_over(self, s: State, *, polls: bool) -> str:
        """What tells a direct reader that nobody looks after the slots for it any more; empty when nothing does."""
        rules = self._rules
        if polls and rules.polls_socket and not s.connected:
            return "the process is gone" if not s.ended else "the session has ended"
        if rules.reads_closed_word and s.view.closed:
            return "closed"
        return "the session has ended" if rules.reads_region_word and s.ended else ""

    def _finish(self, s: State, forward: Forward) -> Step:
        """The second check comes after the last read; what it finds and what leaves is one step."""
        mapping = forward.mapping
        after = s._replace(forward=None).unmark(mapping.slot)
        objection = "stale" if forward.passed is False else ""
        if self._rules.checks_again and forward.passed is None:
            objection = self._objection(s, mapping)
        if objection:
            reached = _discarded(s, forward, objection)
            return Step(f"the second check discards: {objection}", after, reached)
        broken = tuple(_wrong_delivery(s, forward, with_parts=self._direct))
        return Step("delivered", after, _delivered(s, forward), broken)


def _wrong_delivery(s: State, forward: Forward, *, with_parts: bool) -> Iterator[str]:
    mapping, used = forward.mapping, (*forward.seen, *([forward.parts] if with_parts else []))
    if any(content != forward.expected for content in used):
        yield "I8"
    if s.ended:
        yield "SESSION"
    elif not s.up or not s.connected or mapping.epoch != s.layout.epoch:
        yield "I3"
    if mapping.forced or not s.view.layout.is_current((mapping.slot,), mapping.generation):
        yield "STALE"


def _reads(forward: Forward) -> str:
    if TORN in forward.seen:
        return "torn"
    return "right" if {*forward.seen} == {forward.expected} else "wrong"


def _refused(by: str, objection: str, layout: Layout, mapping: Mapping) -> tuple[str, ...]:
    """A refusal is interesting where a weaker check would have passed."""
    refusal, digest = f"{by}: {objection}", letter(layout, mapping.slot)
    current = layout.is_current((mapping.slot,), mapping.generation)
    if current and digest not in ("", mapping.digest):
        return refusal, f"{refusal}, another digest at a current generation"
    if not current and digest == mapping.digest:
        return refusal, f"{refusal}, the same digest in the same slot"
    return (refusal,)


def _discarded(s: State, forward: Forward, objection: str) -> tuple[str, ...]:
    refused = _refused("second check", objection, s.view.layout, forward.mapping)
    reached = [*refused, *(f"{refusal} after {_reads(forward)} reads" for refusal in refused)]
    if forward.mapping.forced:
        reached.append("second check: a force ended the mapping")
    if s.fill is not None and s.fill.slot in s.marks:
        reached.append("second check: a writer waited")
    return tuple(reached)


def _delivered(s: State, forward: Forward) -> tuple[str, ...]:
    state = s.view.layout[forward.mapping.slot].state
    reached = ["delivered", f"delivered from a slot that is {state.value}", f"delivered after {_reads(forward)} reads"]
    if not s.pinned:
        reached.append("delivered without pins")
    if forward.mapping.returned:
        reached.append("delivered after the digest came back")
    return tuple(reached)
