"""A Hypothesis state machine over the cache, where kernels and fills are in flight between steps.

A fill and a kernel are two steps each, begin and end, with anything in between. After every step the invariants hold,
and every Forward that answered read, from its start to its end, the bytes of the digests that its mapping reported.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slotcar_sidecar.core.calls import ForwardCall, LoadCall
from slotcar_sidecar.core.errors import Reason, SlotcarError
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, SessionId, SlotId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.residency import OnConflict

from tests.fakes.parts import SITE, Bench, digest_of, make_bench, settle, vector

NAMES = ("a", "b", "c", "d")
VERSIONS = ("1", "2")
SLOTS = 2
GRACE_SECONDS = 10.0

names = st.sampled_from(NAMES)
versions = st.sampled_from(VERSIONS)
entries = st.lists(st.one_of(st.none(), names), max_size=3)

_ALLOWED_LOAD_ERRORS = {Reason.ADAPTER_CONFLICT, Reason.SLOTS_EXHAUSTED, Reason.ADAPTER_NOT_FOUND}
_ALLOWED_FORWARD_ERRORS = {Reason.LAYOUT_STALE, Reason.MAPPING_NOT_FOUND, Reason.SESSION_NOT_FOUND}


@dataclass
class Sent:
    """A Forward on its way: what its mapping reported, and the task."""

    mapping: Mapping
    task: asyncio.Task[Any]
    cancelled: bool = False


class CacheMachine(RuleBasedStateMachine):
    """Each rule is one step of one actor."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.bench: Bench = self.run(self._make())
        self.sessions: list[SessionId] = []
        self.known: list[tuple[SessionId, Mapping]] = []
        self.forwards: list[Sent] = []
        self.loads: list[asyncio.Task[Any]] = []
        self.generation = 0

    async def _make(self) -> Bench:
        bench = make_bench(SLOTS)
        for name in NAMES:
            bench.source.contents[f"/{name}"] = f"{name}1"
        return bench

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        pools = (self.bench.load_pool, self.bench.compute_pool)
        self.run(settle())
        while any(pool.jobs for pool in pools):
            for pool in pools:
                if pool.jobs:
                    pool.run_one()
            self.run(settle())
        self.check_answers()
        self.check_loads()
        assert not self.forwards
        assert not self.loads
        self.loop.close()

    @initialize(entries=st.permutations(["a", "b"]))
    def start_busy(self, entries: list[str]) -> None:
        """Every slot is taken and mapped: the states worth looking at are few steps from here."""
        for name in entries:
            self.load_at_once(name, OnConflict.FAIL)
        self.open_session()
        self._map(self.sessions[0], 0, list(entries))

    # Operators

    @rule(name=names, version=versions)
    def rewrite_the_source(self, name: str, version: str) -> None:
        self.bench.source.contents[f"/{name}"] = name + version

    @rule(name=names, source=names, on_conflict=st.sampled_from(OnConflict), keep=st.booleans(), known=st.booleans())
    def load(self, name: str, source: str, on_conflict: OnConflict, keep: bool, known: bool) -> None:
        call = LoadCall(AdapterRef(AdapterName(name)), None if known else f"/{source}", on_conflict, keep)
        self.loads.append(self.loop.create_task(self.bench.cache.load(call)))

    @rule(name=names, on_conflict=st.sampled_from(OnConflict))
    def load_at_once(self, name: str, on_conflict: OnConflict) -> None:
        self.load(name, name, on_conflict, keep=False, known=False)
        self.run(settle())
        while self.bench.load_pool.jobs:
            self.bench.load_pool.run_one()
            self.run(settle())

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def abandon_a_load(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.loads)).cancel()

    @rule(name=names)
    def unload_by_force(self, name: str) -> None:
        self.attempt(lambda: self.bench.cache.unload(AdapterRef(AdapterName(name)), force=True))

    @rule(name=names, other=names)
    def take_the_slot_by_force(self, name: str, other: str) -> None:
        """The slot of a mapping that still stands gets other bytes."""
        self.unload_by_force(name)
        self.load_at_once(other, OnConflict.REPLACE)

    @rule(name=names, verb=st.sampled_from(("unload", "keep", "release_keep")))
    def operate(self, name: str, verb: str) -> None:
        cache, ref = self.bench.cache, AdapterRef(AdapterName(name))
        verbs = {
            "unload": lambda: cache.unload(ref, force=False),
            "keep": lambda: cache.keep(ref),
            "release_keep": lambda: cache.release_keep(ref),
        }
        self.attempt(verbs[verb])

    # Engines

    @precondition(lambda self: len(self.sessions) < 3)
    @rule()
    def open_session(self) -> None:
        self.sessions.append(self.bench.cache.open_session("engine", GRACE_SECONDS, None).session_id)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), what=st.sampled_from(("lose its stream", "lose its stream", "resume", "close")))
    def disturb_a_session(self, data: st.DataObject, what: str) -> None:
        cache, session_id = self.bench.cache, data.draw(st.sampled_from(self.sessions))
        if what == "close":
            cache.close_session(session_id)
        elif what == "resume":
            self.attempt(lambda: cache.resume_session(session_id, None))
        elif (session := cache.sessions.get(session_id)).attachment is not None:
            cache.detach_session(session, session.attachment)

    @rule(seconds=st.sampled_from((1.0, GRACE_SECONDS)))
    def let_time_pass(self, seconds: float) -> None:
        self.bench.clock.now += seconds
        self.bench.cache.expire_sessions()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), mapping_id=st.integers(0, 1))
    def map_what_is_resident(self, data: st.DataObject, mapping_id: int) -> None:
        residents = [r for r in self.bench.cache.residency.describe_all() if r.slot is not None]
        choices = [None, *(str(resident.name) for resident in residents)]
        wanted = data.draw(st.lists(st.sampled_from(choices), max_size=3))
        self._map(data.draw(st.sampled_from(self.sessions)), mapping_id, wanted)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), wanted=entries)
    def map_anything(self, data: st.DataObject, wanted: list[str | None]) -> None:
        self._map(data.draw(st.sampled_from(self.sessions)), 0, wanted)

    def _map(self, session_id: SessionId, mapping_id: int, wanted: list[str | None]) -> None:
        refs = [AdapterRef(AdapterName(name)) if name else None for name in wanted]
        mapping = self.attempt(lambda: self.bench.cache.set_mapping(session_id, mapping_id, refs))
        if mapping is not None:
            self.known.append((session_id, mapping))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def map_again_by_digest(self, data: st.DataObject) -> None:
        session_id, old = data.draw(st.sampled_from(self.known))
        refs = [AdapterRef(entry.ref.name, entry.digest) if entry else None for entry in old.entries]
        mapping = self.attempt(lambda: self.bench.cache.set_mapping(session_id, old.mapping_id, refs))
        if mapping is not None:
            assert mapping.digests == old.digests
            self.known.append((session_id, mapping))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release_mapping(self, data: st.DataObject) -> None:
        session_id, mapping = data.draw(st.sampled_from(self.known))
        self.attempt(lambda: self.bench.cache.release_mapping(session_id, mapping.mapping_id))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def send_a_forward(self, data: st.DataObject) -> None:
        """For any mapping that was ever reported, replaced or not: a late Forward must not get another's rows."""
        session_id, mapping = data.draw(st.sampled_from(self.known[-6:]))
        counts = [1] * len(mapping.entries)
        items = [ForwardItem(SITE, vector(len(counts)))]
        call = ForwardCall(session_id, mapping.mapping_id, mapping.generation, counts, items, "unary")
        self.forwards.append(Sent(mapping, self.loop.create_task(self.bench.cache.forward(call))))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def compute_at_once(self, data: st.DataObject) -> None:
        self.send_a_forward(data)
        self.run(settle())
        while self.bench.compute_pool.jobs:
            self.bench.compute_pool.run_one()

    @precondition(lambda self: self.forwards)
    @rule(data=st.data())
    def abandon_a_forward(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.forwards)).task.cancel()

    # Threads

    @precondition(lambda self: self.bench.load_pool.jobs)
    @rule(data=st.data())
    def end_a_fill(self, data: st.DataObject) -> None:
        self.bench.load_pool.run_one(data.draw(st.integers(0, len(self.bench.load_pool.jobs) - 1)))

    @precondition(lambda self: self.bench.load_pool.jobs)
    @rule()
    def fail_a_fill(self) -> None:
        self.bench.device.fail_fill = RuntimeError("the device refused the write")
        self.bench.load_pool.run_one()
        self.bench.device.fail_fill = None

    @precondition(lambda self: self.bench.compute_pool.jobs)
    @rule(data=st.data())
    def end_a_kernel(self, data: st.DataObject) -> None:
        self.bench.compute_pool.run_one(data.draw(st.integers(0, len(self.bench.compute_pool.jobs) - 1)))

    # What holds after every step

    def attempt(self, step: Any) -> Any:
        try:
            return step()
        except SlotcarError:
            return None

    @invariant()
    def everything_holds(self) -> None:
        self.run(settle())
        cache = self.bench.cache
        cache.check_integrity()
        cache.check_bytes()
        assert cache.layout.generation >= self.generation, "I3"
        self.generation = cache.layout.generation
        for index, slot in enumerate(cache.layout.slots):
            if slot.state in (SlotState.OCCUPIED, SlotState.DRAINING):
                assert self.bench.device.bytes[SlotId(index)] == str(slot.digest), "I1"
        assert not self.bench.device.written_while_read, "I2"
        self.check_answers()
        self.check_loads()
        self.sessions = [session.session_id for session in cache.sessions]
        ended = [known for known in self.known if known[0] not in self.sessions]
        self.known = ended[-1:] + [known for known in self.known if known[0] in self.sessions]

    def check_loads(self) -> None:
        for task in [task for task in self.loads if task.done()]:
            self.loads.remove(task)
            if not task.cancelled() and isinstance(error := task.exception(), SlotcarError):
                assert error.reason in _ALLOWED_LOAD_ERRORS, error

    def check_answers(self) -> None:
        for sent in [sent for sent in self.forwards if sent.task.done()]:
            self.forwards.remove(sent)
            if sent.task.cancelled():
                continue
            error = sent.task.exception()
            if error is not None:
                assert isinstance(error, SlotcarError), error
                assert error.reason in _ALLOWED_FORWARD_ERRORS, error
                continue
            computed = sent.task.result()
            assert computed.layout.is_current(sent.mapping.slots, sent.mapping.generation), "I2, the second check"
            read = bytes(computed.outputs[0].data).decode().split("\n") if sent.mapping.entries else []
            assert tuple(read) == sent.mapping.digests == computed.digests, "I8"


CacheMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_digests_of_the_fakes_differ() -> None:
    """The oracle above could not see a swap otherwise."""
    contents = [name + version for name in NAMES for version in VERSIONS]
    assert len({digest_of(content) for content in contents}) == len(contents)
