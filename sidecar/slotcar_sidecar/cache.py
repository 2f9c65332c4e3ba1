"""AdapterCache, the single owner of all mutable state: every change is made here, on the event loop's thread.

Invariant I8: no row is computed with a digest other than the one that SetMapping reported for its entry. A Forward
marks the slots it reads, checks that they have not begun to change since its mapping was made, computes, and checks
again before the result leaves. A load publishes a slot as filling, waits until nobody is marked on it, writes, and
publishes it as occupied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from slotcar_sidecar.core.calls import Computed, Estimate, ForwardCall, LoadCall, Loaded, check_forward
from slotcar_sidecar.core.errors import (
    CapacityExceeded,
    LayoutStale,
    ModelUnknown,
    ShuttingDown,
    SlotcarError,
)
from slotcar_sidecar.core.events import EventKind, EventLog
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest, SessionId, SlotId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.marks import Marks
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.pins import MappingOwner
from slotcar_sidecar.core.ports import Device, Environment, HostAdapter, Limits, Tiers
from slotcar_sidecar.core.residency import Residency, Unloaded
from slotcar_sidecar.core.session import Session, Sessions
from slotcar_sidecar.core.tensor import ITEM_BYTES

T = TypeVar("T")

_MAX_LOADING = 4


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
        self.residency = residency
        self.sessions = sessions
        self.tiers = tiers
        self.device = device
        self.model: ModelSpec | None = None
        self.shutting_down = False
        self.forwards_in_flight = 0
        self.last_forward_at = environment.clock()
        self._environment = environment
        self.limits = limits
        self._marks = Marks()
        self._fills: dict[Digest, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        # Weights that are read and not yet in the host tier are outside its bound: only so many at a time.
        self._loading = asyncio.Semaphore(_MAX_LOADING)
        self.closing = asyncio.Event()

    @property
    def environment(self) -> Environment:
        return self._environment

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
            return await asyncio.wait_for(self._changed.wait(), timeout_seconds)
        except TimeoutError:
            return False

    def _publish(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def shut_down(self) -> None:
        """Refuses new loads and sessions from now on; what runs goes on."""
        self.shutting_down = True
        self._publish()

    def close(self) -> None:
        """Ends every stream."""
        self.shutting_down = True
        self.closing.set()
        self._publish()

    @property
    def closed(self) -> bool:
        return self.closing.is_set()

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
        self.model = model
        self._publish()

    # Adapters

    async def load(self, call: LoadCall) -> Loaded:
        """Makes an adapter resident under a name. The load goes on when the caller goes away."""
        if self.shutting_down:
            raise ShuttingDown
        return await self._outliving(self._load(call))

    async def _load(self, call: LoadCall) -> Loaded:
        try:
            async with self._loading:
                return await self._place(call, *await self._find_weights(call))
        except SlotcarError as error:
            reason = f"{error.reason}: {error.message}"
            self.events.record(EventKind.REFUSED, self.layout.generation, name=call.ref.name, reason=reason)
            self._publish()
            raise

    async def _find_weights(self, call: LoadCall) -> tuple[HostAdapter, str | None]:
        """The verified weights, and the caller's source if they were read there; a known digest is not read again."""
        ref, source = call.ref, call.source
        if source is not None:
            uri = await self.tiers.canonical(source)
            known = self.tiers.from_host(ref.digest) if ref.digest is not None else None
            return (known, None) if known else (await self.tiers.from_source(uri, ref.digest), uri)
        digest = ref.digest or self.residency.digest_of(ref)
        known = self.tiers.from_host(digest)
        return known or await self.tiers.from_source(self.residency.source_of(ref), digest), None

    async def _place(self, call: LoadCall, weights: HostAdapter, source: str | None) -> Loaded:
        adapter, name = weights.adapter, call.ref.name
        if self.model is not None:  # whether it can be computed is known before anything is evicted
            await self._run(self._environment.load_pool, self.device.check, weights)
        self.residency.check_name(name, adapter.digest, call.on_conflict, keep=call.keep)
        claim = object()
        # What the name has now stays, too, until the name has moved: a replace is served all the time.
        claimed = {adapter.digest, self.residency.digest_named(name) or adapter.digest}
        for digest in claimed:
            self.residency.claim(digest, claim)
        try:
            self.tiers.host.put(weights)
            if self.model is None:
                raise ModelUnknown
            already_resident = await self._make_resident(weights, name)
            self.residency.bind(name, adapter, call.on_conflict, keep=call.keep, source=source)
        finally:
            for digest in claimed:
                self.residency.unclaim(digest, claim)
            self._publish()
        return Loaded(self.residency.describe(AdapterRef(name)), self.model, self.layout, already_resident)

    async def _make_resident(self, weights: HostAdapter, name: AdapterName) -> bool:
        """Fills a slot unless one has the digest; says whether one had. Calls for one digest share a fill."""
        digest, resident = weights.adapter.digest, True
        # A forced unload may free the slot between the end of the fill and the waking of the load: then once more.
        while digest in self._fills or self.layout.find(digest) is None:
            resident = False
            if digest not in self._fills:
                slot = self.residency.begin_fill(digest, name)
                self._publish()
                self._fills[digest] = asyncio.create_task(self._fill(slot, weights))
            await asyncio.shield(self._fills[digest])
        return resident

    async def _fill(self, slot: SlotId, weights: HostAdapter) -> None:
        """Writes a slot that is published as filling, once nobody reads it."""
        clock, observer = self._environment.clock, self._environment.observer
        start = clock()
        try:
            unread = asyncio.get_running_loop().create_future()
            self._marks.when_unread(slot, lambda: unread.set_result(None))
            await unread
            observer.load_stage("wait", clock() - start)
            start = clock()
            await self._run(self._environment.load_pool, self.device.fill, slot, weights)
            self.residency.finish_fill(slot)
            observer.load_stage("fill", clock() - start)
        except BaseException:
            self.residency.abandon_fill(slot)
            raise
        finally:
            del self._fills[weights.adapter.digest]

    async def estimate(self, source: str) -> Estimate:
        """What a load of `source` would take, or why it would be refused. Raises what reading it raises."""
        async with self._loading:
            weights = await self.tiers.from_source(await self.tiers.canonical(source), None)
            adapter, refusal = weights.adapter, await self._refusal_of(weights)
        item_bytes = ITEM_BYTES[self.device.slot_dtype]
        device_bytes = sum((p.in_features + p.out_features) * p.rank * item_bytes for p in adapter.parts)
        return Estimate(adapter, self.model, device_bytes, refusal)

    async def _refusal_of(self, weights: HostAdapter) -> SlotcarError | None:
        try:
            if self.model is None:
                raise ModelUnknown
            await self._run(self._environment.load_pool, self.device.check, weights)
            self.tiers.host.check(weights)
        except SlotcarError as error:
            return error
        return None

    def unload(self, ref: AdapterRef, *, force: bool) -> Unloaded:
        """Takes a name away. Never waits."""
        unloaded = self.residency.unload(ref, force=force)
        self._publish()
        return unloaded

    def keep(self, ref: AdapterRef) -> None:
        self.residency.keep(ref)
        self._publish()

    def release_keep(self, ref: AdapterRef) -> None:
        self.residency.release_keep(ref)
        self._publish()

    # Sessions

    def open_session(self, client_name: str, grace_seconds: float, model: ModelSpec | None) -> Session:
        """A new session. Raises ModelMismatch when the engine's model is not the server's."""
        if self.shutting_down:
            raise ShuttingDown
        session = self.sessions.open(SessionId(self._environment.new_id()), client_name, grace_seconds)
        try:
            if model is not None:
                self.adopt_model(model)
        except BaseException:
            self.sessions.end(session.session_id)
            raise
        self._record_session(EventKind.SESSION_OPENED, session, client_name)
        return session

    def resume_session(self, session_id: SessionId, model: ModelSpec | None) -> Session:
        """A session within its grace, or one whose stream is dead though the server does not know yet."""
        if self.shutting_down:
            raise ShuttingDown
        self.sessions.get(session_id)
        if model is not None:
            self.adopt_model(model)
        session = self.sessions.resume(session_id)
        self._publish()
        return session

    def detach_session(self, session: Session, attachment: int) -> None:
        """The session's stream is gone; its grace begins."""
        self.sessions.detach(session, attachment, self._environment.clock())

    def close_session(self, session_id: SessionId, reason: str = "closed") -> None:
        """Ends a session and all that it owns. Idempotent."""
        session = self.sessions.end(session_id)
        if session is not None:
            for mapping_id in session.mappings:
                self.residency.release(MappingOwner(session_id, mapping_id))
            self._record_session(EventKind.SESSION_ENDED, session, reason)

    def expire_sessions(self) -> None:
        """Ends the sessions whose grace has passed."""
        for session in self.sessions.expired(self._environment.clock()):
            self.close_session(session.session_id, "grace passed")

    def _record_session(self, kind: EventKind, session: Session, reason: str) -> None:
        self.events.record(kind, self.layout.generation, session=session.session_id, reason=reason)
        self._publish()

    # Mappings

    def set_mapping(self, session_id: SessionId, mapping_id: int, refs: Sequence[AdapterRef | None]) -> Mapping:
        """Resolves and pins in one step, all or nothing."""
        session = self.sessions.get(session_id)
        self.limits.check_entries("entries", len(refs))
        self.sessions.check_room(session, mapping_id)
        entries = self.residency.resolve(refs, session_id)
        if self.layout.generation <= session.last_generation:
            # A generation names one mapping of the session, so that a Forward that was sent for the mapping before
            # can never be taken for one of this.
            self.residency.advance()
        mapping = Mapping(mapping_id, entries, self.layout.epoch, self.layout.generation)
        session.mappings[mapping_id] = mapping
        session.last_generation = mapping.generation
        before = self.layout
        self.residency.pin(MappingOwner(session_id, mapping_id), mapping.slots)
        if self.layout is not before:
            self._publish()
        return mapping

    def release_mapping(self, session_id: SessionId, mapping_id: int) -> None:
        """Ends a mapping and its pins. Idempotent."""
        session = self.sessions.get(session_id)
        session.mappings.pop(mapping_id, None)
        self.residency.release(MappingOwner(session_id, mapping_id))
        self._publish()

    # The computation

    async def forward(self, call: ForwardCall) -> Computed:
        """Computes a LoRA for rows of a mapping. The slots stay marked until the kernels end, caller or not."""
        return await self._outliving(self._observed_forward(call))

    async def _observed_forward(self, call: ForwardCall) -> Computed:
        clock = self._environment.clock
        start, reason = clock(), "INTERNAL"
        self.forwards_in_flight += 1
        try:
            computed = await self._forward(call)
            reason = "OK"
            return computed
        except SlotcarError as error:
            reason = str(error.reason)
            if isinstance(error, LayoutStale):
                session, message = call.session, error.message
                self.events.record(EventKind.FORWARD_STALE, self.layout.generation, session=session, reason=message)
                self._publish()
            raise
        finally:
            self.forwards_in_flight -= 1
            self.last_forward_at = clock()
            self._environment.observer.forward(call.plane, sum(call.row_counts), clock() - start, reason)

    async def _forward(self, call: ForwardCall) -> Computed:
        clock = self._environment.clock
        start = clock()
        mapping = self.sessions.get(call.session).mapping(call.mapping_id)
        mapping.check_generation(call.generation)
        rows = mapping.rows(call.row_counts)
        if self.model is None:
            raise ModelUnknown
        check_forward(call, self.model, self.limits)
        with self._marks.reading(mapping.slots):
            mapping.check_current(self.layout)
            self.residency.touch(mapping.slots)
            batch = self.device.prepare(rows, call.items)
            prepared = clock()
            outputs = await self._run(self._environment.compute_pool, self.device.execute, batch)
            mapping.check_current(self.layout)
        return Computed(outputs, mapping.digests, self.layout, prepared - start, clock() - prepared)

    # Shared

    async def _run(self, pool: Executor, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)

    async def _outliving(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, which goes on to its end when the caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return await asyncio.shield(task)

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def check_integrity(self) -> None:
        """Asserts the invariants that hold at every moment; I6 needs sessions and pins together."""
        self.residency.check_integrity()
        for slot in self.residency.pins.pinned():
            for owner in self.residency.pins.of(slot):
                assert owner.mapping_id in self.sessions.get(owner.session).mappings, "I6"

    def check_bytes(self) -> None:
        """Asserts I1 for every readable slot whose bytes are in the host tier. Slow: for tests."""
        for slot in self.layout.in_state(SlotState.OCCUPIED, SlotState.DRAINING):
            digest = self.layout[slot].digest
            weights = self.tiers.host.get(digest) if digest is not None else None
            assert weights is None or self.device.matches(slot, weights), f"I1: slot {slot}"
