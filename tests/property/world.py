"""The world of the cache's state machine: what there is, what is known of it, and what holds after every step."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis.stateful import RuleBasedStateMachine, invariant
from slotcar_sidecar.core.bindings import OnConflict
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import Reason, SlotcarError
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, SessionId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.policy import Eviction

from tests.fakes.disk import FakeFolder
from tests.fakes.parts import Bench, make_bench, settle
from tests.property.oracle import Sent, check_answer, check_everything, check_progress

NAMES = ("a", "b", "c", "d")
VERSIONS = ("1", "2")
SLOTS = 3
# Each adapter has one byte: not all versions of all names fit.
DISK_BYTES = 5
GRACE_SECONDS = 10.0
WAIT_SECONDS = 20.0
HOLD_SECONDS = 5.0


LOAD_ERRORS = {
    Reason.ADAPTER_CONFLICT, Reason.SLOTS_EXHAUSTED, Reason.ADAPTER_NOT_FOUND, Reason.REQUEST_INVALID,
    Reason.SESSION_NOT_FOUND, Reason.DIGEST_MISMATCH,
}  # fmt: skip
MAPPING_ERRORS = {
    Reason.ADAPTER_NOT_FOUND, Reason.ADAPTER_NOT_RESIDENT, Reason.SLOTS_EXHAUSTED, Reason.SESSION_NOT_FOUND,
    Reason.MAPPING_NOT_FOUND, Reason.REQUEST_INVALID, Reason.CAPACITY_EXCEEDED, Reason.DIGEST_MISMATCH,
    Reason.SHUTTING_DOWN,
}  # fmt: skip


@dataclass
class Asked:
    """A SetMapping or a hold on its way; nobody hears the answer to one whose reply is lost."""

    task: asyncio.Task[Any]
    session: SessionId
    lost: bool = False


class World(RuleBasedStateMachine):
    """One server after the other, and what its clients know. `reached` counts the states worth looking at."""

    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.lives = 0
        self.folder = FakeFolder(DISK_BYTES)
        self.eviction = Eviction.LRU
        self.sessions: list[SessionId] = []
        self.known: list[tuple[SessionId, Mapping]] = []
        self.digests: dict[tuple[SessionId, int, int], tuple[str, ...]] = {}
        self.start_again()

    def start_again(self) -> None:
        """A new life of the server: nothing of the old one is there but what clients remember of it."""
        self.lives += 1
        self.bench: Bench = self.run(self._make())
        self.sessions = []
        self.forwards: list[Sent] = []
        self.loads: list[asyncio.Task[Any]] = []
        self.asked: list[Asked] = []
        self.fences: list[tuple[asyncio.Task[None], tuple[asyncio.Task[Any], ...]]] = []
        self.generation = 0
        self.waiting = 0

    async def _make(self) -> Bench:
        self.folder.begin_life()
        bench = make_bench(
            SLOTS, life=self.lives, fills_only=self.lives == 1, eviction=self.eviction, folder=self.folder
        )
        for name in NAMES:
            bench.source.contents[f"/{name}"] = f"{name}1"
        return bench

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        """Whatever happened, all of it comes to an end, and then every slot can be filled."""
        self.finish_all()
        cache = self.bench.cache
        for session in tuple(cache.sessions):
            cache.close_session(session.session_id)
        self.finish_all()
        self.everything_holds()
        for tasks in (self.forwards, self.loads, self.asked, self.fences):
            assert not tasks
        assert not cache.residency.pins.pinned()
        assert not len(cache.residency.holds)
        assert not cache.residency.slots.reserved
        for name in cache.residency.names:
            cache.unload(AdapterRef(name), force=False)
        assert cache.capacity().available == SLOTS
        assert cache.capacity().host.held_bytes == 0
        assert not self.folder.needed, "a mark that nobody will take away"
        for name in NAMES[:SLOTS]:
            self.load_at_once(name, OnConflict.FAIL)
        assert cache.capacity().pinned == 0
        self.everything_holds()
        self.loop.close()

    def finish_all(self) -> None:
        pools = (self.bench.load_pool, self.bench.compute_pool)
        self.run(settle())
        while any(pool.jobs for pool in pools):
            for pool in pools:
                if pool.jobs:
                    pool.run_one()
            self.run(settle())

    def load_at_once(self, name: str, on_conflict: OnConflict, *, in_slot: bool = True) -> None:
        call = LoadCall(AdapterRef(AdapterName(name)), f"/{name}", on_conflict, in_slot=in_slot)
        self.loads.append(self.loop.create_task(self.bench.cache.load(call)))
        self.finish_loads()

    def finish_loads(self) -> None:
        """Everything that loads goes on to its end, or until it waits for something else."""
        self.run(settle())
        while self.bench.load_pool.jobs:
            self.bench.load_pool.run_one()
            self.run(settle())

    def learn(self, session_id: SessionId, mapping: Mapping) -> None:
        """A client hears of a mapping. I10: whoever hears of one generation of it hears of the same digests."""
        key = (session_id, mapping.mapping_id, mapping.generation)
        assert self.digests.setdefault(key, mapping.digests) == mapping.digests, "I10"
        self.known.append((session_id, mapping))

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
        assert cache.layout.generation >= self.generation, "I3"
        self.generation = cache.layout.generation
        check_everything(self.bench)
        check_progress(self.bench)
        self.check_uploads()
        self.note_what_is_reached()
        self.take_answers()
        self.sessions = [session.session_id for session in cache.sessions]
        ended = [known for known in self.known if known[0] not in self.sessions]
        self.known = ended[-2:] + [known for known in self.known if known[0] in self.sessions]

    def check_uploads(self) -> None:
        """What no source has is somewhere: in memory, or on a disk that will keep it."""
        residency, host = self.bench.cache.residency, self.bench.cache.tiers.host
        for digest in residency.names.without_source():
            is_kept = self.folder.needed.get(digest, False) and digest in self.folder.entries
            assert digest in host or residency.slots.is_claimed(digest) or is_kept, f"{digest} is nowhere"
            self.reached["an upload is on disk alone"] += digest not in host and is_kept
        assert self.folder.used_bytes <= DISK_BYTES
        assert self.bench.cache.capacity().disk.used_bytes >= 0

    def note_what_is_reached(self) -> None:
        cache, reached = self.bench.cache, self.reached
        reached["a fill waits for a reader"] += any(cache._state.marks._when_unread.values())
        reached["a slot is held"] += any(hold.slot for hold in cache.residency.holds)
        queue, reserved = cache.residency.slots.queue, cache.residency.slots.reserved
        reached["two calls wait"] += len(queue) > 1
        reached["slots are reserved"] += bool(reserved)
        reached["calls wait beside a reservation"] += bool(reserved and queue)
        reached["two slots are written"] += len(cache.layout.in_state(SlotState.FILLING)) > 1
        reached["a server of a later life"] += self.lives > 1
        waiting = len(cache.residency.slots.queue)
        reached["a call that waited is served or refused"] += waiting < self.waiting
        self.waiting = waiting
        while self.bench.seen:
            reached[self.bench.seen.pop().kind.value] += 1

    def take_answers(self) -> None:
        for sent in [sent for sent in self.forwards if sent.task.done()]:
            self.forwards.remove(sent)
            self.reached[f"Forward: {check_answer(sent)}"] += 1
        for asked in [asked for asked in self.asked if asked.task.done()]:
            self.asked.remove(asked)
            answer = self.answer(asked.task, MAPPING_ERRORS)
            if isinstance(answer, Mapping) and not asked.lost:
                self.learn(asked.session, answer)
        for task in [task for task in self.loads if task.done()]:
            self.loads.remove(task)
            self.answer(task, LOAD_ERRORS)
        for fence, before in [each for each in self.fences if each[0].done()]:
            self.fences.remove((fence, before))
            assert fence.cancelled() or all(task.done() for task in before), "Fence"

    def answer(self, task: asyncio.Task[Any], allowed: set[Reason]) -> Any:
        if task.cancelled():
            return None
        error = task.exception()
        if isinstance(error, SlotcarError):
            assert error.reason in allowed, error
            self.reached[f"refused: {error.reason}"] += 1
        return None if error is not None else task.result()
