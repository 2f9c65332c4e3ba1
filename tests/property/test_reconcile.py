"""Any files, results, changes from outside and steps of the clock: the declared set is reached, or said why not."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from slotcar_sidecar.core.desired import (
    LAST_RETRY_SECONDS,
    Cause,
    DesiredSet,
    EntryState,
    Malformed,
    Seen,
    Want,
    Wanted,
    delay_seconds,
)
from slotcar_sidecar.core.errors import Reason
from slotcar_sidecar.core.ids import AdapterName

from tests.property.reconcile_loop import MOST_AT_A_TIME, SLOTS, SOURCES, Content, Loop, digest_of

NAMES = [AdapterName(text) for text in ("a", "b", "c", "d", "e")]


@st.composite
def wants(draw: st.DrawFn) -> DesiredSet:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=len(NAMES)))
    found = []
    for name in names:
        state = draw(st.sampled_from(list(Wanted)))
        source = draw(st.sampled_from(SOURCES))
        digest = draw(st.sampled_from([None, None, digest_of(source, 0), digest_of(source, 1)]))
        in_slot = state is Wanted.KEEP or draw(st.booleans())
        is_absent = state is Wanted.ABSENT
        found.append(Want(name, state) if is_absent else Want(name, state, source, digest, in_slot))
    broken = draw(st.lists(st.sampled_from(["", *(str(name) for name in NAMES if name not in names)]), max_size=2))
    cause = Cause(Reason.REQUEST_INVALID, "no")
    malformed = tuple(Malformed(f"adapters[{index}]", name, cause) for index, name in enumerate(broken))
    return DesiredSet(tuple(found), malformed, draw(st.booleans()))


class ReconcileMachine(RuleBasedStateMachine):
    @initialize(model_known=st.booleans())
    def begin(self, model_known: bool) -> None:
        self.loop = Loop()
        self.loop.world.model_known = model_known
        self.desired = DesiredSet()

    @rule(desired=wants())
    def declare(self, desired: DesiredSet) -> None:
        self.desired = desired
        self.loop.declare(desired)

    @rule(index=st.integers(0, 3))
    def finish(self, index: int) -> None:
        if self.loop.begun:
            self.loop.finish(index)

    @rule(seconds=st.sampled_from([0.5, 1.0, 7.0, LAST_RETRY_SECONDS]))
    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @rule(name=st.sampled_from(NAMES))
    def somebody_unloads(self, name: AdapterName) -> None:
        if self.loop.world.names.pop(name, None):
            self.loop.judge({name})

    @rule(name=st.sampled_from(NAMES), version=st.integers(0, 1), kept=st.booleans())
    def somebody_loads(self, name: AdapterName, version: int, kept: bool) -> None:
        kept = kept and self.loop.world.model_known and len(self.loop.world.kept | {name}) < SLOTS
        self.loop.world.names[name] = Seen(digest_of("elsewhere", version), kept)
        self.loop.judge({name})

    @rule(
        source=st.sampled_from(SOURCES),
        version=st.integers(0, 2),
        fails=st.sampled_from([None, None, Reason.ADAPTER_INVALID, Reason.SOURCE_UNAVAILABLE]),
    )
    def source_changes(self, source: str, version: int, fails: Reason | None) -> None:
        self.loop.world.sources[source] = Content(version, fails)

    @rule()
    def the_model_arrives(self) -> None:
        self.loop.world.model_known = True

    @invariant()
    def the_table_is_sound(self) -> None:
        loop = getattr(self, "loop", None)
        if loop is not None:
            loop.table.check_integrity()
            out = [action.want.name for action in (*loop.waiting, *loop.begun)]
            assert len(out) == len(set(out)), "two actions for one name"
            assert len(loop.begun) == MOST_AT_A_TIME or not loop.waiting, "a place is free and somebody waits"

    def teardown(self) -> None:
        loop = getattr(self, "loop", None)
        if loop is None:
            return
        # What was written before a source changed may be tried again only after a look, and a keep after another's end.
        for _ in range(4):
            loop.judge(loop.table.names)
            loop.finish_all()
            loop.advance(LAST_RETRY_SECONDS)
            loop.finish_all()
        loop.judge(loop.table.names)
        loop.finish_all()
        self.check_reached()
        loads = loop.loads
        assert loop.judge(loop.table.names) == 0, "a settled set asks for something"
        for _ in range(3):
            loop.judge(loop.table.names)
        assert loop.loads == loads

    def check_reached(self) -> None:
        loop, world = self.loop, self.loop.world
        states = {status.name: status for status in loop.table.status(world.now) if status.want is not None}
        assert states.keys() == {str(want.name) for want in self.desired.wants}
        for want in self.desired.wants:
            status, seen = states[str(want.name)], world.seen(want.name)
            if want.state is Wanted.ABSENT:
                assert (status.state, seen) == (EntryState.ABSENT, None)
                continue
            content = world.sources[want.source]
            mismatch = want.digest not in (None, digest_of(want.source, content.version))
            if status.state is EntryState.READY:
                assert seen is not None
                assert want.digest in (None, seen.digest)
                assert seen.kept == (want.state is Wanted.KEEP)
            elif status.state is EntryState.PENDING:
                assert not world.model_known
                assert status.cause is not None
            else:
                assert status.state is EntryState.FAILED
                assert status.cause is not None
                full = want.state is Wanted.KEEP and len(world.kept) == SLOTS - 1
                assert content.fails or mismatch or full, f"{want} could be had: {status}"


TestReconcile = ReconcileMachine.TestCase
TestReconcile.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def want(name: str, source: str = "/x", **fields: object) -> Want:
    return replace(Want(AdapterName(name), source=source), **fields)  # type: ignore[arg-type]


def test_a_source_that_was_bad_only_while_it_was_read_is_read_again() -> None:
    """Such as a link that went to another version and back."""
    loop = Loop()
    loop.declare(DesiredSet((want("a"),)))
    loop.world.sources["/x"] = Content(1, Reason.ADAPTER_INVALID)
    loop.finish(0)
    loop.world.sources["/x"] = Content()
    loop.advance(LAST_RETRY_SECONDS)
    loop.finish_all()
    assert loop.world.seen(AdapterName("a")) == Seen(digest_of("/x", 0), kept=False)


def test_one_that_fails_for_ever_holds_up_nobody() -> None:
    loop = Loop()
    loop.world.sources["/x"].fails = Reason.SOURCE_UNAVAILABLE
    bad = [Want(AdapterName(f"bad-{number}"), source="/x") for number in range(50)]
    good = [Want(AdapterName(f"good-{number}"), source="/y") for number in range(50)]
    loop.declare(DesiredSet((*bad, *good)))
    loop.finish_all()
    counts = loop.table.counts()
    assert (counts[EntryState.FAILED], counts[EntryState.READY]) == (50, 50)
    assert loop.loads == 100
    assert loop.table.is_settled


def test_back_off_doubles_and_has_an_end() -> None:
    loop = Loop()
    loop.world.sources["/x"].fails = Reason.SOURCE_UNAVAILABLE
    loop.declare(DesiredSet((want("a"),)))
    waited = []
    for _ in range(9):
        loop.finish_all()
        (status,) = loop.table.status(loop.world.now)
        assert status.state is EntryState.FAILED
        assert status.next_try_seconds is not None
        waited.append(status.next_try_seconds)
        loop.advance(status.next_try_seconds)
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert delay_seconds(10_000) == LAST_RETRY_SECONDS
    assert len(loop.told) == 1, "the same failure is told once"


def test_what_waiting_does_not_mend_is_loaded_again_only_when_its_source_changes() -> None:
    loop = Loop()
    loop.world.sources["/x"] = Content(0, Reason.ADAPTER_INVALID)
    loop.declare(DesiredSet((want("a"),)))
    loop.finish_all()
    for _ in range(20):
        loop.advance(LAST_RETRY_SECONDS)
        loop.finish_all()
    (status,) = loop.table.status(loop.world.now)
    assert (status.attempts, status.next_try_seconds) == (1, None)
    loop.world.sources["/x"] = Content(1)
    loop.advance(LAST_RETRY_SECONDS)
    loop.finish_all()
    assert loop.table.counts()[EntryState.READY] == 1
    assert loop.loads == 2


def test_an_entry_that_changes_is_tried_at_once() -> None:
    loop = Loop()
    loop.world.sources["/x"].fails = Reason.ADAPTER_INVALID
    loop.declare(DesiredSet((want("a"),)))
    loop.finish_all()
    loop.declare(DesiredSet((want("a", "/y"),)))
    loop.finish_all()
    assert loop.world.names[NAMES[0]].digest == digest_of("/y", 0)


def test_a_keep_that_finds_no_room_has_it_as_soon_as_there_is_some() -> None:
    loop = Loop()
    keeps = [want(name, state=Wanted.KEEP, in_slot=True) for name in "abc"]
    loop.declare(DesiredSet(tuple(keeps)))
    loop.finish_all()
    assert loop.world.kept == set(NAMES[:2]), "the first in the file"
    (failed,) = loop.table.waiting_for(Reason.SLOTS_EXHAUSTED)
    for _ in range(10):
        loop.advance(LAST_RETRY_SECONDS)
        loop.finish_all()
    loop.declare(DesiredSet((replace(keeps[0], state=Wanted.PRESENT), *keeps[1:])))
    loop.finish_all()
    loop.world.now += 1.0
    loop.judge({failed})
    loop.finish_all()
    assert loop.world.kept == set(NAMES[1:3])


def test_without_a_model_it_is_named_and_goes_into_a_slot_when_the_model_comes() -> None:
    loop = Loop()
    loop.world.model_known = False
    loop.declare(DesiredSet((want("a", state=Wanted.KEEP, in_slot=True),)))
    loop.finish_all()
    (status,) = loop.table.status(loop.world.now)
    assert (status.state, status.cause and status.cause.reason) == (EntryState.PENDING, Reason.MODEL_UNKNOWN)
    assert not loop.world.names[NAMES[0]].kept
    assert loop.judge(loop.table.names) == 0
    loop.world.model_known = True
    loop.judge(loop.table.names)
    loop.finish_all()
    assert loop.world.names[NAMES[0]].kept


def test_pruned_is_only_what_was_declared_before() -> None:
    loop = Loop()
    loop.world.names[NAMES[4]] = Seen(digest_of("by hand", 0), kept=False)
    loop.declare(DesiredSet((want("a"), want("b"))))
    loop.finish_all()
    loop.declare(DesiredSet((want("a"),)))
    assert set(loop.world.names) == {NAMES[0], NAMES[1], NAMES[4]}
    cause = Cause(Reason.REQUEST_INVALID, "no")
    loop.declare(DesiredSet((want("a"),), (Malformed("adapters[1]", "", cause),), prune=True))
    assert NAMES[1] in loop.world.names, "a malformed entry might have meant it"
    loop.declare(DesiredSet((want("a"),), (Malformed("adapters[1]", "b", cause),), prune=True))
    assert NAMES[1] in loop.world.names, "a malformed entry means it"
    loop.declare(DesiredSet((want("a"),), prune=True))
    assert set(loop.world.names) == {NAMES[0], NAMES[4]}


def test_a_load_under_way_for_an_entry_that_is_gone_is_undone() -> None:
    loop = Loop()
    loop.declare(DesiredSet((want("a"),)))
    loop.declare(DesiredSet(prune=True))
    assert not loop.table.is_settled
    loop.finish_all()
    assert loop.world.names == {}
    assert loop.table.is_settled


def test_who_is_evicted_is_ready_all_the_same() -> None:
    loop = Loop()
    loop.declare(DesiredSet((want("a", in_slot=True),)))
    loop.finish_all()
    assert loop.judge(loop.table.names) == 0
