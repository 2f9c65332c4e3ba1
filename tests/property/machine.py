"""A Hypothesis state machine over the cache, where kernels, fills and callers are in flight between steps.

A fill has two steps, begin and end, and a kernel three, as it reads on after its launch has returned; anything comes in
between. A caller that pauses is a task that is not looked at, and a reply that is lost one whose answer nobody keeps.
After every step the invariants I1 to I10 hold, and every Forward that answered read, from its start to its end, the
bytes of the digests that its mapping reported.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from slotcar_sidecar.core.bindings import OnConflict
from slotcar_sidecar.core.calls import ForwardCall, LoadCall, MappingCall, PrefetchCall
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.holds import HoldTerms
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, SessionId
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.pins import HoldOwner
from slotcar_sidecar.core.policy import Eviction
from slotcar_sidecar.core.session import SessionTerms

from tests.fakes.parts import IDLE_SECONDS, SITE, FakeUpload, at_once, digest_of, settle, vector
from tests.fakes.planes import over_direct, start_over_ring
from tests.property.oracle import Sent, check_answer
from tests.property.world import GRACE_SECONDS, HOLD_SECONDS, NAMES, VERSIONS, WAIT_SECONDS, Asked, World

names = st.sampled_from(NAMES)
versions = st.sampled_from(VERSIONS)
entries = st.lists(st.one_of(st.none(), names), max_size=3)


class CacheMachine(World):
    """Each rule is one step of one actor."""

    @initialize(
        entries=st.permutations(["a", "b", "c"]),
        reserved_slots=st.sampled_from((0, 1, 2)),
        eviction=st.sampled_from(Eviction),
    )
    def start(self, entries: list[str], reserved_slots: int, eviction: Eviction) -> None:
        """Nothing that holds depends on who gives way."""
        self.eviction = eviction
        self.lives -= 1
        self.start_again()
        self.start_busy(entries, reserved_slots)

    def start_busy(self, entries: list[str], reserved_slots: int) -> None:
        """Every slot is taken and mapped by one of three engines: the hard states are few steps from here."""
        if reserved_slots:
            self.open_session(reserved_slots=reserved_slots, ranks=1)
        for name in entries:
            self.load_at_once(name, OnConflict.FAIL)
        self.load_at_once("d", OnConflict.FAIL, in_slot=False)
        for mapped in (entries[:2], entries[2:]):
            self.open_session(reserved_slots=0, ranks=1)
            self._map_now(self.sessions[-1], 0, [AdapterRef(AdapterName(name)) for name in mapped])

    # Operators

    @rule(name=names, version=versions)
    def rewrite_the_source(self, name: str, version: str) -> None:
        self.bench.source.contents[f"/{name}"] = name + version

    @rule(name=names, source=names, on_conflict=st.sampled_from(OnConflict), data=st.data())
    def load(self, name: str, source: str, on_conflict: OnConflict, data: st.DataObject) -> None:
        known, in_slot, keep, hold = (data.draw(st.booleans()) for _ in range(4))
        call = LoadCall(
            AdapterRef(AdapterName(name)),
            None if known else f"/{source}",
            on_conflict,
            keep=keep and in_slot,
            in_slot=in_slot,
            hold=HoldTerms(HoldOwner(data.draw(st.sampled_from(self.sessions)), 0), HOLD_SECONDS, slot=in_slot)
            if hold and self.sessions
            else None,
        )
        self.loads.append(self.loop.create_task(self.bench.cache.load(call)))

    @rule(name=names, on_conflict=st.sampled_from(OnConflict))
    def load_whole(self, name: str, on_conflict: OnConflict) -> None:
        self.load_at_once(name, on_conflict)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def abandon_a_load(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.loads)).cancel()

    @precondition(lambda self: len(self.loads) < 8)
    @rule(wanted=st.lists(names, min_size=1, max_size=3), in_slot=st.booleans())
    def prefetch(self, wanted: list[str], in_slot: bool) -> None:
        refs = [AdapterRef(AdapterName(name)) for name in wanted]
        self.loads.append(self.loop.create_task(self.bench.cache.prefetch(PrefetchCall(refs, in_slot=in_slot))))

    @precondition(lambda self: len(self.loads) < 8)
    @rule(name=names, version=versions, on_conflict=st.sampled_from(OnConflict), in_slot=st.booleans())
    def upload(self, name: str, version: str, on_conflict: OnConflict, in_slot: bool) -> None:
        """Of bytes that a source may have, too."""
        content = FakeUpload(name + version)
        call = LoadCall(AdapterRef(AdapterName(name)), None, on_conflict, in_slot=in_slot, upload=content)
        self.loads.append(self.loop.create_task(self.bench.cache.load(call)))

    @rule(name=names, version=versions)
    def upload_what_then_leaves_memory(self, name: str, version: str) -> None:
        """Not in a slot, and not held: the disk alone has it, if it takes it."""
        self.folder.is_full = False
        self.upload(name, version, OnConflict.REPLACE, in_slot=False)
        self.finish_loads()
        digest = digest_of(name + version)
        if digest not in self.bench.cache._state.held_digests():
            self.bench.cache.tiers.host.drop(digest)

    @rule(data=st.data(), what=st.sampled_from(("drop", "drop", "damage", "lose", "fill", "empty")))
    def disturb_the_tiers(self, data: st.DataObject, what: str) -> None:
        """Memory drops what it may, an entry that is not needed is damaged or evicted elsewhere, the disk is full."""
        cache, folder = self.bench.cache, self.folder
        held = cache._state.held_digests()
        droppable = [d for version in VERSIONS for name in NAMES if (d := digest_of(name + version)) not in held]
        spare = [digest for digest in folder.entries if not folder.needed.get(digest, False)]
        if what in ("fill", "empty"):
            folder.is_full = what == "fill"
        elif what == "drop" and droppable:
            cache.tiers.host.drop(data.draw(st.sampled_from(droppable)))
        elif what == "damage" and spare:
            folder.damaged.add(data.draw(st.sampled_from(spare)))
        elif what == "lose" and spare:
            folder.lose(data.draw(st.sampled_from(spare)))

    @rule(name=names)
    def unload_by_force(self, name: str) -> None:
        self.attempt(lambda: self.bench.cache.unload(AdapterRef(AdapterName(name)), force=True))

    @rule(name=names, other=names)
    def take_the_slot_by_force(self, name: str, other: str) -> None:
        """The slot of a mapping that still stands gets other bytes."""
        self.unload_by_force(name)
        self.load_at_once(other, OnConflict.REPLACE)

    @rule(name=names, verb=st.sampled_from(("unload", "keep", "keep", "release_keep", "release_keep")))
    def operate(self, name: str, verb: str) -> None:
        cache, ref = self.bench.cache, AdapterRef(AdapterName(name))
        verbs = {
            "unload": lambda: cache.unload(ref, force=False),
            "keep": lambda: cache.keep(ref),
            "release_keep": lambda: cache.release_keep(ref),
        }
        self.attempt(verbs[verb])

    @precondition(lambda self: self.lives < 2)
    @rule(
        entries=st.permutations(["a", "b", "c"]),
        reserved_slots=st.sampled_from((0, 1)),
        really=st.sampled_from((False, False, False, True)),
    )
    def kill_and_restart(self, entries: list[str], reserved_slots: int, really: bool) -> None:
        if not really:
            return
        for task in (*self.loads, *(sent.task for sent in self.forwards), *(asked.task for asked in self.asked)):
            task.cancel()
        for fence, _ in self.fences:
            fence.cancel()
        self.finish_all()
        self.start_again()
        self.start_busy(entries, reserved_slots)

    # Sessions

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(reserved_slots=st.sampled_from((0, 0, 1, 2)), ranks=st.sampled_from((1, 1, 2)))
    def open_session(self, reserved_slots: int, ranks: int) -> None:
        terms = SessionTerms("engine", GRACE_SECONDS, ranks, reserved_slots)
        session = self.attempt(lambda: self.bench.cache.open_session(terms, None))
        if session is not None:
            self.sessions.append(session.session_id)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), what=st.sampled_from(("lose its stream", "lose its stream", "resume", "close", "end")))
    def disturb_a_session(self, data: st.DataObject, what: str) -> None:
        cache, session_id = self.bench.cache, data.draw(st.sampled_from(self.sessions))
        if what == "close":
            cache.close_session(session_id)
        elif what == "end":
            assert cache.end_session(session_id.short)
        elif what == "resume":
            self.attempt(lambda: cache.resume_session(session_id, None))
        elif (session := cache.sessions.get(session_id)).attachment is not None:
            cache.detach_session(session, session.attachment)

    @rule(seconds=st.sampled_from((1.0, HOLD_SECONDS, GRACE_SECONDS, WAIT_SECONDS, IDLE_SECONDS)))
    def let_time_pass(self, seconds: float) -> None:
        self.bench.clock.now += seconds
        self.bench.cache.expire()

    # Mappings and holds

    def refs_for(self, session_id: SessionId, wanted: list[str | None]) -> list[AdapterRef | None]:
        """Names, as an engine of several ranks has to say them: with the digest that it knows."""
        names, ranks = self.bench.cache.residency.names, self.bench.cache.sessions.get(session_id).terms.ranks
        refs = [AdapterRef(AdapterName(name)) if name else None for name in wanted]
        if ranks == 1:
            return list(refs)
        return [AdapterRef(ref.name, names.get(ref.name)) if ref else None for ref in refs]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), mapping_id=st.integers(0, 1))
    def map_what_is_resident(self, data: st.DataObject, mapping_id: int) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        residents = [r for r in self.bench.cache.residency.describe_all() if r.slot is not None]
        choices = [None, *(str(resident.name) for resident in residents)]
        wanted = data.draw(st.lists(st.sampled_from(choices), max_size=3))
        self._map_now(session, mapping_id, self.refs_for(session, wanted))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def map_again_by_digest(self, data: st.DataObject) -> None:
        session_id, old = data.draw(st.sampled_from(self.known))
        mapping = self._map_now(session_id, old.mapping_id, list(old.refs))
        if mapping is not None:
            assert mapping.digests == old.digests

    def _map_now(self, session_id: SessionId, mapping_id: int, refs: list[AdapterRef | None]) -> Mapping | None:
        call = MappingCall(session_id, mapping_id, Folded.of(refs))
        mapping: Mapping | None = self.attempt(lambda: at_once(self.bench.cache.set_mapping(call)))
        if mapping is not None:
            self.learn(session_id, mapping)
        return mapping

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), wanted=entries, mapping_id=st.integers(0, 1), load=st.booleans(), lost=st.booleans())
    def ask_for_a_mapping(
        self, data: st.DataObject, wanted: list[str | None], mapping_id: int, load: bool, lost: bool
    ) -> None:
        session_id = data.draw(st.sampled_from(self.sessions))
        wait = data.draw(st.sampled_from((0.0, WAIT_SECONDS, WAIT_SECONDS)))
        refs = tuple(self.refs_for(session_id, wanted))
        work = self.bench.cache.set_mapping(MappingCall(session_id, mapping_id, Folded.of(refs), load, wait))
        self.asked.append(Asked(self.loop.create_task(work), session_id, lost))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), wanted=st.lists(names, min_size=2, max_size=3, unique=True), mapping_id=st.integers(0, 1))
    def want_what_others_have(self, data: st.DataObject, wanted: list[str], mapping_id: int) -> None:
        """More than is free, and patience."""
        session_id = data.draw(st.sampled_from(self.sessions))
        refs = tuple(self.refs_for(session_id, list(wanted)))
        work = self.bench.cache.set_mapping(MappingCall(session_id, mapping_id, Folded.of(refs), True, WAIT_SECONDS))
        self.asked.append(Asked(self.loop.create_task(work), session_id))
        self.run(settle())
        while self.bench.load_pool.jobs and data.draw(st.booleans()):
            self.bench.load_pool.run_one()
            self.run(settle())

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), name=names, hold_id=st.integers(0, 1), slot=st.booleans(), timed=st.booleans())
    def hold(self, data: st.DataObject, name: str, hold_id: int, slot: bool, timed: bool) -> None:
        session_id = data.draw(st.sampled_from(self.sessions))
        terms = HoldTerms(HoldOwner(session_id, hold_id), HOLD_SECONDS if timed else None, slot)
        work = self.bench.cache.hold(terms, AdapterRef(AdapterName(name)))
        self.asked.append(Asked(self.loop.create_task(work), session_id, lost=True))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), hold_id=st.integers(0, 1))
    def release_hold(self, data: st.DataObject, hold_id: int) -> None:
        self.bench.cache.release_hold(data.draw(st.sampled_from(self.sessions)), hold_id)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def give_up_asking(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.asked)).task.cancel()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release_mapping(self, data: st.DataObject) -> None:
        session_id, mapping = data.draw(st.sampled_from(self.known))
        self.attempt(lambda: self.bench.cache.release_mapping(session_id, mapping.mapping_id))

    # Forwards

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

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def send_over_a_ring(self, data: st.DataObject) -> None:
        """A thread that nobody hands its work to is in the midst of a kernel, or was refused."""
        session_id, mapping = data.draw(st.sampled_from(self.known[-6:]))
        work = start_over_ring(self.bench, session_id, mapping)
        self.forwards.append(Sent(mapping, self.loop.create_task(work)))
        self.run(settle())
        self.reached["a ring computes"] += not self.forwards[-1].task.done()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def compute_directly(self, data: st.DataObject) -> None:
        """A client that has nothing but the slots and the words that were published."""
        session_id, mapping = data.draw(st.sampled_from(self.known[-6:]))
        if mapping.epoch == self.bench.cache.layout.epoch:
            done = self.loop.create_future()
            computed = self.attempt(lambda: over_direct(self.bench, session_id, mapping))
            if computed is not None:
                done.set_result(computed)
                self.reached[f"direct: {check_answer(Sent(mapping, done))}"] += 1

    @precondition(lambda self: self.forwards)
    @rule(data=st.data())
    def abandon_a_forward(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.forwards)).task.cancel()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        session = self.bench.cache.sessions.get(data.draw(st.sampled_from(self.sessions)))
        before = tuple(session.running)
        self.fences.append((self.loop.create_task(self.bench.cache.fence(session.session_id)), before))
        self.run(settle())

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

    @precondition(lambda self: self.bench.device.reading)
    @rule(data=st.data())
    def launch_a_kernel(self, data: st.DataObject) -> None:
        """The launch returns; the kernel goes on to read."""
        self.bench.device.launch(data.draw(st.sampled_from(self.bench.device.reading)))

    @precondition(lambda self: self.bench.compute_pool.jobs)
    @rule(data=st.data())
    def end_a_kernel(self, data: st.DataObject) -> None:
        self.bench.compute_pool.run_one(data.draw(st.integers(0, len(self.bench.compute_pool.jobs) - 1)))
