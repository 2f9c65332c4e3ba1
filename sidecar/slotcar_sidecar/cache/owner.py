"""AdapterCache: every change of slots, names, sessions and mappings is made here, on the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Unpack

from slotcar_sidecar.cache.forwards import Forwards
from slotcar_sidecar.cache.holds import SessionHolds
from slotcar_sidecar.cache.journal import JournalWriter
from slotcar_sidecar.cache.loads import Loads
from slotcar_sidecar.cache.mappings import Mappings
from slotcar_sidecar.cache.prefetch import Prefetches
from slotcar_sidecar.cache.restore import Restore
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.cache.threads import Tell, ThreadForwards
from slotcar_sidecar.core.bindings import Unloaded
from slotcar_sidecar.core.calls import (
    Capacity,
    Computed,
    Estimate,
    ForwardCall,
    LoadCall,
    Loaded,
    MappingCall,
    PrefetchCall,
    Prefetched,
    TierUse,
)
from slotcar_sidecar.core.errors import CapacityExceeded, ShuttingDown
from slotcar_sidecar.core.events import EventKind, EventLog, Subject
from slotcar_sidecar.core.holds import Hold, HoldTerms
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, SessionId
from slotcar_sidecar.core.journal import JournalEntry
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.pins import MappingOwner
from slotcar_sidecar.core.ports import Device, Environment, Journal, Limits, Tiers, Upload
from slotcar_sidecar.core.residency import Residency
from slotcar_sidecar.core.session import Session, Sessions, SessionTerms
from slotcar_sidecar.core.tensor import ITEM_BYTES


class AdapterCache:
    """Slots, names, sessions and mappings, and the computation over them."""

    def __init__(
        self,
        residency: Residency,
        sessions: Sessions,
        tiers: Tiers,
        device: Device,
        environment: Environment,
        limits: Limits,
    ) -> None:
        self._state = State(residency, sessions, tiers, device, environment, limits)
        self._loads = Loads(self._state)
        self._prefetches = Prefetches(self._state, self._loads)
        self._mappings = Mappings(self._state, self._loads)
        self._holds = SessionHolds(self._state, self._loads)
        self._forwards = Forwards(self._state, self._mappings)
        self._restore = Restore(self._state, self._loads, ())
        self._journal: JournalWriter | None = None
        self._threads: set[ThreadForwards] = set()
        self.when_session_ends: list[Callable[[Session], None]] = []
        self.residency = residency
        self.sessions = sessions
        self.tiers = tiers
        self.device = device
        self.environment = environment
        self.limits = limits

    @property
    def model(self) -> ModelSpec | None:
        return self._state.model

    @property
    def layout(self) -> Layout:
        return self.residency.layout

    @property
    def events(self) -> EventLog:
        return self.residency.events

    # Watching

    async def wait_for_change(self, timeout_seconds: float) -> bool:
        """Waits until anything changes after the call; False when the time is over."""
        try:
            await asyncio.wait_for(self._state.changed.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    def tell(self, kind: EventKind, **subject: Unpack[Subject]) -> None:
        """Records what happened elsewhere in the server, for whoever watches."""
        self.events.record(kind, self.layout.generation, **subject)
        self._state.publish()

    def capacity(self) -> Capacity:
        """How full each tier is and what is promised to whom."""
        residency, host, disk, held = self.residency, self.tiers.host, self.tiers.disk, self._state.held_digests()
        return Capacity(
            slots={state: len(self.layout.in_state(state)) for state in SlotState},
            pinned=len(residency.pins.pinned()),
            available=0 if residency.slots.queue else residency.slots.available(),
            reserved=residency.slots.reserved_slots,
            keeps=len(residency.names.kept),
            slot_bytes=self.device.slot_bytes(),
            host=TierUse(host.used_bytes, host.capacity_bytes, host.bytes_of(held), host.adapters),
            disk=TierUse(disk.used_bytes, disk.capacity_bytes, disk.retained_bytes, disk.adapters),
            adapters=(len(residency.names), residency.names.capacity),
            sessions=(len(self.sessions), self.sessions.capacity),
            waiting=self._mappings.waiting,
            restoring=self._restore.waiting,
            restore_failures={failure.entry.ref: failure.why for failure in self._restore.failed.values()},
        )

    def awaited(self) -> frozenset[AdapterName]:
        """The names for which slots are being written, or that mappings which wait for slots want and have not."""
        return frozenset(self._loads.filling) | self._mappings.missing()

    # What outlives the process

    async def restore(self, entries: Sequence[JournalEntry], journal: Journal) -> None:
        """Takes the names of a journal back, and writes it from now on.

        Returns once those are there whose bytes the disk tier has; `restored` brings the rest.
        """
        self._restore = Restore(self._state, self._loads, entries)
        self._journal = JournalWriter(self._state, self._restore, journal)
        await self._restore.name_what_is_on_disk()

    async def restored(self) -> None:
        """Returns when nothing of the journal is left to try."""
        await self._restore.run()

    async def flush(self) -> None:
        """Returns when what is to outlive the process is written, or cannot be."""
        self.tiers.disk.flush()
        if self._journal is not None:
            await self._journal.flush()

    # The end

    @property
    def closing(self) -> asyncio.Event:
        return self._state.closing

    @property
    def closed(self) -> bool:
        return self._state.closing.is_set()

    def shut_down(self) -> None:
        """Refuses new loads and sessions from now on; what runs goes on."""
        self._state.shutting_down = True
        self._state.publish()

    def close(self) -> None:
        """Ends every stream, and every call that waits."""
        self._state.closing.set()
        self.shut_down()
        self.device.close()

    # The model

    def adopt_model(self, model: ModelSpec) -> None:
        """Shapes the slots for `model`, or raises ModelMismatch when they are shaped for another."""
        if self.model is not None:
            self.model.check_agrees(model)
            return
        device = self.device
        needed = device.slots * model.slot_bytes(device.max_rank, ITEM_BYTES[device.slot_dtype])
        if needed > self.limits.device_bytes:
            raise CapacityExceeded(
                f"{device.slots} slots of rank {device.max_rank} for this model need {needed} bytes, "
                f"the device may use {self.limits.device_bytes}: use fewer slots or a smaller --max-rank",
                found=needed,
                wanted=self.limits.device_bytes,
            )
        device.shape(model)
        device.publish(self.layout)
        self._state.model = model
        self._state.publish()

    # Adapters

    async def load(self, call: LoadCall) -> Loaded:
        """Makes an adapter resident under a name. The load goes on when the caller goes away."""
        loaded = await self._loads.load(call)
        self._restore.settle(call.ref.name)
        return loaded

    def upload(self, config_bytes: int, weights_bytes: int) -> AbstractContextManager[Upload]:
        """Takes the files of an adapter while the context is open; `load` makes use of them."""
        return self._loads.upload(config_bytes, weights_bytes)

    async def prefetch(self, call: PrefetchCall) -> tuple[Prefetched, ...]:
        """Brings adapters nearer, each as far as that costs nobody anything. Goes on when the caller goes away."""
        return await self._prefetches.prefetch(call)

    async def estimate(self, source: str) -> Estimate:
        """What a load of `source` would take, or why it would be refused. Raises what reading it raises."""
        return await self._loads.estimate(source)

    def unload(self, ref: AdapterRef, *, force: bool) -> Unloaded:
        """Takes a name away. Never waits."""
        self._restore.settle(ref.name)
        unloaded = self.residency.unload(ref, force=force)
        self._state.publish()
        return unloaded

    def keep(self, ref: AdapterRef) -> None:
        self.residency.keep(ref)
        self._state.publish()

    def release_keep(self, ref: AdapterRef) -> None:
        self.residency.release_keep(ref)
        self._state.publish()

    # Sessions

    def open_session(self, terms: SessionTerms, model: ModelSpec | None) -> Session:
        """A new session. Raises ModelMismatch when the engine's model is not the server's."""
        self._check_serving()
        session_id = self._new_session_id()
        session = self.sessions.open(session_id, terms)
        try:
            self.residency.slots.reserve(session_id, terms.reserved_slots, len(self.residency.names.kept))
            if model is not None:
                self.adopt_model(model)
        except BaseException:
            self.residency.slots.reserved.pop(session_id, None)
            self.sessions.end(session_id)
            raise
        self._record_session(EventKind.SESSION_OPENED, session, terms.client_name)
        return session

    def _new_session_id(self) -> SessionId:
        """An id whose part that others see is nobody else's."""
        while True:
            session_id = SessionId(self.environment.new_id())
            if self.sessions.find(session_id.short) is None:
                return session_id

    def _check_serving(self) -> None:
        if self._state.shutting_down:
            raise ShuttingDown

    def resume_session(self, session_id: SessionId, model: ModelSpec | None) -> Session:
        """A session within its grace, or one whose stream is dead though the server does not know yet."""
        self._check_serving()
        self.sessions.get(session_id)
        if model is not None:
            self.adopt_model(model)
        session = self.sessions.resume(session_id)
        self._state.publish()
        return session

    def detach_session(self, session: Session, attachment: int) -> None:
        """The session's stream is gone; its grace begins."""
        self.sessions.detach(session, attachment, self._state.now())

    def join_session(self, session_id: SessionId, rank: int) -> tuple[Session, int]:
        """One rank of a session comes with a stream of its own; returns the session and the stream's number."""
        self._check_serving()
        session = self.sessions.get(session_id)
        attachment = self.sessions.join(session, rank)
        self._state.publish()
        return session, attachment

    def close_session(self, session_id: SessionId, reason: str = "closed") -> None:
        """Ends a session and all that it owns. Idempotent."""
        session = self.sessions.end(session_id)
        if session is None:
            return
        self.residency.release(*(MappingOwner(session_id, mapping_id) for mapping_id in session.mappings))
        for hold in self.residency.holds.of_session(session_id):
            self.residency.release_hold(hold.owner, "the session ended")
        self.residency.slots.reserved.pop(session_id, None)
        self._mappings.wake_session(session_id)
        for call in self.when_session_ends:
            call(session)
        self._record_session(EventKind.SESSION_ENDED, session, reason)

    def end_session(self, short: str) -> bool:
        """Ends the session that others see as `short`, as an operator; False if there is none."""
        session = self.sessions.find(short)
        if session is not None:
            self.close_session(session.session_id, "ended by an operator")
        return session is not None

    def expire(self) -> None:
        """Ends what is over: the grace of sessions, the time of holds and of calls that wait, idle mappings' pins."""
        for session in self.sessions.expired(self._state.now()):
            self.close_session(session.session_id, "grace passed")
        self._mappings.expire()
        self._holds.expire()
        if self._journal is not None:
            self._journal.look()

    def _record_session(self, kind: EventKind, session: Session, reason: str) -> None:
        self.events.record(kind, self.layout.generation, session=session.session_id, reason=reason)
        self._state.publish()

    # Mappings and holds

    async def set_mapping(self, call: MappingCall) -> Mapping:
        """Resolves and pins in one step, all or nothing; see MappingCall."""
        return await self._mappings.set(call)

    def release_mapping(self, session_id: SessionId, mapping_id: int) -> None:
        """Ends a mapping and its pins. Idempotent."""
        self._mappings.release(session_id, mapping_id)

    async def hold(self, terms: HoldTerms, ref: AdapterRef) -> Hold:
        """Keeps an adapter from leaving; see HoldTerms."""
        return await self._holds.hold(terms, ref)

    def release_hold(self, session_id: SessionId, hold_id: int) -> None:
        """Ends a hold. Idempotent."""
        self._holds.release(session_id, hold_id)

    # The computation

    async def forward(self, call: ForwardCall) -> Computed:
        """Computes a LoRA for rows of a mapping. The slots stay marked until the kernels end, caller or not."""
        return await self._forwards.forward(call)

    async def fence(self, session_id: SessionId) -> None:
        """Returns when every Forward of the session that came before has ended, answered or not."""
        await self._forwards.fence(session_id)

    def in_thread(self, tell: Tell) -> ThreadForwards:
        """Forwards for a thread to compute by itself; `tell` runs what it is given soon, in the owner's thread."""
        forwards = ThreadForwards(self._state, self._mappings, tell)
        self._threads.add(forwards)
        return forwards

    def end_thread(self, forwards: ThreadForwards) -> None:
        """The thread that used them has ended."""
        self._threads.discard(forwards)
        forwards.end()

    def used_elsewhere(self, session: Session, generations: Collection[int]) -> None:
        """The session computed by itself with its mappings of these generations."""
        for mapping in tuple(session.mappings.values()):
            if mapping.generation in generations:
                self._mappings.used(session, mapping)
                self.residency.slots.uses.touch(mapping.slots)
        self._forwards.last_at = self._state.now()

    def running(self, session: Session) -> int:
        """How many Forwards of the session are under way in this process."""
        return len(session.running) + sum(forwards.reads_for(session) for forwards in self._threads)

    @property
    def forwards_in_flight(self) -> int:
        return self._forwards.in_flight + sum(forwards.is_reading for forwards in self._threads)

    @property
    def last_forward_at(self) -> float:
        return max([self._forwards.last_at, *(forwards.last_at for forwards in self._threads)])

    # Proof

    def check_integrity(self) -> None:
        """Asserts the invariants that hold at every moment; I6 needs sessions and pins together."""
        self.residency.check_integrity()
        for owners in self.residency.pins.owners.values():
            for owner in owners:
                if isinstance(owner, MappingOwner):
                    assert owner.mapping_id in self.sessions.get(owner.session).mappings, "I6"
        assert all(hold.owner.session in {s.session_id for s in self.sessions} for hold in self.residency.holds), "I6"
        assert self.residency.slots.reserved.keys() <= {session.session_id for session in self.sessions}, "I6"

    def check_bytes(self) -> None:
        """Asserts I1 for every readable slot whose bytes are in the host tier. Slow: for tests."""
        for slot in self.layout.in_state(SlotState.OCCUPIED, SlotState.DRAINING):
            digest = self.layout[slot].digest
            weights = self.tiers.host.get(digest) if digest is not None else None
            assert weights is None or self.device.matches(slot, weights), f"I1: slot {slot}"
        for digest in self._state.held_digests():
            assert digest in self.tiers.host or self.residency.slots.is_claimed(digest), f"{digest} is held"
