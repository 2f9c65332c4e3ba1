"""Loads: from a source or an upload to verified bytes in memory, and from there into a slot (invariant I2).

A load publishes its slot as filling, waits until nobody is marked on it, writes, and publishes it as occupied.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterator
from typing import NamedTuple

from slotcar_sidecar.cache.reads import Reads
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.bindings import Binding
from slotcar_sidecar.core.calls import Estimate, LoadCall, Loaded
from slotcar_sidecar.core.errors import CapacityExceeded, ModelUnknown, Reason, ShuttingDown, SlotcarError
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest, SlotId
from slotcar_sidecar.core.ports import HostAdapter, Upload
from slotcar_sidecar.core.reservations import Party
from slotcar_sidecar.core.slots import Claim, Demand
from slotcar_sidecar.core.tensor import ITEM_BYTES
from slotcar_sidecar.core.thrash import Evicted

_log = logging.getLogger("slotcar.loads")

_MAX_UPLOADS = 4
_MAX_UNDER_WAY = 1024


class _Fill(NamedTuple):
    """A slot that is being written, and for which name."""

    task: asyncio.Task[None]
    name: AdapterName


class Loads:
    """Loads under way. Calls for one digest share a fill."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._fills: dict[Digest, _Fill] = {}
        self._evicted = Evicted()
        self._reads = Reads(state)
        self._under_way = 0
        self._uploads: set[Upload] = set()
        self._loaded_uploads: set[Upload] = set()

    @contextlib.contextmanager
    def upload(self, config_bytes: int, weights_bytes: int) -> Iterator[Upload]:
        """Takes the files of an adapter while the context is open; they are outside the host tier's bound."""
        if self._state.shutting_down:
            raise ShuttingDown
        if len(self._uploads) >= _MAX_UPLOADS:
            raise CapacityExceeded("other uploads are under way", found=len(self._uploads), wanted=_MAX_UPLOADS)
        upload = self._state.tiers.begin_upload(config_bytes, weights_bytes)
        self._uploads.add(upload)
        try:
            yield upload
        finally:
            if upload not in self._loaded_uploads:
                self._uploads.discard(upload)

    async def load(self, call: LoadCall) -> Loaded:
        """Makes an adapter resident under a name. The load goes on when the caller goes away."""
        self._state.waits.for_load()
        if self._state.shutting_down:
            raise ShuttingDown
        if self._under_way >= _MAX_UNDER_WAY:
            raise CapacityExceeded("too many loads are under way", found=self._under_way, wanted=_MAX_UNDER_WAY)
        self._under_way += 1
        if call.upload is not None:
            self._loaded_uploads.add(call.upload)
        if call.hold is None:
            return await self._state.outliving(self._load(call, None))
        with self._state.pending_hold(call.hold.owner) as token:
            return await self._state.outliving(self._load(call, token))

    async def _load(self, call: LoadCall, hold_token: object | None) -> Loaded:
        state = self._state
        try:
            state.check_target(on_disk=call.on_disk)
            if call.hold is not None:
                state.check_hold(call.hold.owner)
            with self._counted():
                async with self._reads.of_call(call) as (weights, source):
                    loaded = await self._place(call, hold_token, weights, source)
                    saved = self.save(weights)
            if call.upload is not None or call.on_disk:
                # The answer says whether the disk took it: nobody could read an upload again.
                await saved
                told = self._unsaved(weights.adapter.digest, on_disk=call.on_disk)
                loaded = dataclasses.replace(loaded, warnings=(*loaded.warnings, *told))
            if call.on_disk:
                self.leave_memory(weights.adapter.digest)
            return loaded
        except SlotcarError as error:
            reason = f"{error.reason}: {error.message}"
            state.events.record(EventKind.REFUSED, state.layout.generation, name=call.ref.name, reason=reason)
            state.publish()
            raise
        finally:
            self._under_way -= 1
            if call.upload is not None:
                self._loaded_uploads.discard(call.upload)
                self._uploads.discard(call.upload)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts how the load inside ends."""
        reason = str(Reason.INTERNAL)
        try:
            yield
            reason = "OK"
        except SlotcarError as error:
            reason = str(error.reason)
            raise
        finally:
            self._state.environment.observer.loaded(reason)

    async def _place(
        self, call: LoadCall, hold_token: object | None, weights: HostAdapter, source: str | None
    ) -> Loaded:
        state, residency = self._state, self._state.residency
        adapter, name = weights.adapter, call.ref.name
        binding = Binding(name, call.on_conflict, call.keep, source, call.in_slot)
        warnings = await self._losses(weights)
        residency.check_binding(adapter, binding)
        claim = Claim(self._party(call, adapter.digest), bytes=not adapter.source or call.hold is not None)
        # What the name has now stays, too, until the name has moved: a replace is served all the time.
        claimed = {adapter.digest, residency.names.get(name) or adapter.digest}
        for digest in claimed:
            residency.claim(digest, claim)
        try:
            self._put(weights, state.held_digests())
            if call.in_slot:
                already_resident = await self.make_resident(weights, name, claim)
            else:
                already_resident = residency.readable_slot(adapter.digest) is not None
            # A hold that was released meanwhile, or whose caller is gone, would be nobody's to release.
            terms = call.hold if call.hold and state.is_pending(call.hold.owner, hold_token) else None
            if terms is not None:
                state.check_hold(terms.owner)
            residency.bind(adapter, binding)
            hold = residency.hold(terms, AdapterRef(name, adapter.digest), state.now()) if terms else None
        finally:
            for digest in claimed:
                residency.unclaim(digest, claim)
            state.publish()
        resident = residency.describe(AdapterRef(name))
        return Loaded(resident, state.model, state.layout, already_resident, hold, warnings)

    def _party(self, call: LoadCall, digest: Digest) -> Party:
        """For whom the slot is: the session that will hold it in its reservation, or anybody."""
        hold = call.hold
        if hold is not None and hold.slot and self._state.residency.may_hold_slot(hold.owner, digest):
            return hold.owner.session
        return None

    async def _check(self, weights: HostAdapter) -> None:
        """Whether it can be computed is known before anything is evicted. Raises AdapterInvalid."""
        if self._state.model is not None:
            await self._state.run(self._state.environment.load_pool, self._state.device.check, weights)

    async def _losses(self, weights: HostAdapter) -> tuple[str, ...]:
        """The same, and what it loses in a slot is for people to know."""
        if self._state.model is None:
            return ()
        return await self._state.run(self._state.environment.load_pool, self._state.device.losses, weights)

    # Steps for whoever needs bytes or slots

    async def bytes_of(self, ref: AdapterRef, beside: Collection[Digest] = ()) -> HostAdapter:
        """The verified bytes of a known digest, in memory from now on as long as it is claimed, and sure to fit.

        Nothing of `beside` is dropped for it.
        """
        self._state.waits.for_load()
        with self._counted():
            async with self._reads.of_ref(ref) as weights:
                await self._check(weights)
                self._put(weights, self._state.held_digests().union(beside))
                self.save(weights)
        return weights

    def _put(self, weights: HostAdapter, held: Collection[Digest]) -> None:
        """Into memory, where others than those of `held` may give way. Raises CapacityExceeded."""
        for _ in self._state.tiers.host.put(weights, held):
            self._state.environment.observer.evicted("host", "capacity")

    def leave_memory(self, digest: Digest) -> None:
        """What is on disk need not be in memory, unless somebody holds it there."""
        tiers = self._state.tiers
        if digest in tiers.disk and digest not in self._state.held_digests():
            tiers.host.drop(digest)

    def save(self, weights: HostAdapter) -> asyncio.Future[None]:
        """Begins to store on disk what has a name now; loads do not wait for that."""
        only = self._state.residency.names.is_without_source(weights.adapter.digest)
        return self._state.tiers.save(weights, only=only)

    def _unsaved(self, digest: Digest, *, on_disk: bool) -> tuple[str, ...]:
        """What people must know of an adapter that the disk tier did not take, if it was to."""
        disk = self._state.tiers.disk
        if not disk.capacity_bytes or not self._state.residency.names.is_named(digest):
            return ()
        if self._state.residency.names.is_without_source(digest):
            if disk.retains(digest):
                return ()
            return ("the disk tier did not take it: its bytes are in memory alone, and gone when the server ends",)
        if digest in disk or not on_disk:
            return ()
        return ("the disk tier did not take it: it stays in memory, and after a restart its source is read again",)

    async def make_resident(self, weights: HostAdapter, name: AdapterName, claim: Claim) -> bool:
        """Fills a slot unless one has the digest; says whether one had. Raises SlotsExhausted or ModelUnknown."""
        state, digest, resident = self._state, weights.adapter.digest, True
        if state.model is None:
            raise ModelUnknown
        is_there = state.layout.find(digest) is not None
        state.environment.observer.looked_up("device", hits=int(is_there), misses=int(not is_there))
        # A forced unload may free the slot between the end of the fill and the waking of the load: then once more.
        while digest in self._fills or state.layout.find(digest) is None:
            resident = False
            state.residency.claim(digest, claim)
            fills = int(digest not in self._fills)
            state.residency.slots.check(Demand(str(name), claim.party, state.residency.pins, fills))
            if fills:
                self.begin(weights, name, "load")
            else:
                _tell("another load fills the slot", digest, adapter=str(name))
            await self.filled(digest)
        return resident

    def begin(self, weights: HostAdapter, name: AdapterName, purpose: str, idle_since: int | None = None) -> None:
        """Takes a slot, for which there is room, and begins to fill it; see Slots.take, and Observer.evicted."""
        digest = weights.adapter.digest
        slot, victim = self._state.residency.begin_fill(digest, name, idle_since)
        if victim is not None:
            self._evicted.leave(victim, self._state.now())
            self._state.environment.observer.evicted("device", purpose)
        evicted = victim.short if victim is not None else ""
        _tell("slot taken", digest, adapter=str(name), slot=slot, purpose=purpose, evicted=evicted)
        self._state.publish()
        self._fills[digest] = _Fill(asyncio.create_task(self._fill(slot, weights)), name)

    async def filled(self, digest: Digest) -> None:
        """Waits for the fill of a digest, if there is one. Raises what it raised."""
        self._state.waits.for_load()
        if digest in self._fills:
            await asyncio.shield(self._fills[digest].task)

    @property
    def filling(self) -> tuple[AdapterName, ...]:
        """The names for which slots are being written."""
        return tuple(fill.name for fill in self._fills.values())

    async def _fill(self, slot: SlotId, weights: HostAdapter) -> None:
        """Writes a slot that is published as filling, once nobody reads it."""
        state, observer = self._state, self._state.environment.observer
        start = state.now()
        try:
            unread = asyncio.Event()
            state.marks.when_unread(slot, unread.set)
            await unread.wait()
            observer.load_stage("wait", state.now() - start, weights.adapter.digest)
            start = state.now()
            await state.run(state.environment.load_pool, state.device.fill, slot, weights)
            state.residency.finish_fill(slot)
            observer.load_stage("fill", state.now() - start, weights.adapter.digest)
            _tell("slot filled", weights.adapter.digest, slot=slot, fill_seconds=round(state.now() - start, 6))
            if self._evicted.come(weights.adapter.digest, state.now()):
                observer.thrashed()
        except BaseException:
            state.residency.abandon_fill(slot)
            raise
        finally:
            del self._fills[weights.adapter.digest]

    # Looking without loading

    async def estimate(self, source: str) -> Estimate:
        """What a load of `source` would take, or why it would be refused. Raises what reading it raises."""
        state = self._state
        async with self._reads.of_source(source) as weights:
            adapter, refusal = weights.adapter, await self._refusal_of(weights)
        item_bytes = ITEM_BYTES[state.device.slot_dtype]
        device_bytes = sum((p.in_features + p.out_features) * p.rank * item_bytes for p in adapter.parts)
        return Estimate(adapter, state.model, device_bytes, refusal)

    async def _refusal_of(self, weights: HostAdapter) -> SlotcarError | None:
        try:
            if self._state.model is None:
                raise ModelUnknown
            await self._check(weights)
            self._state.tiers.host.check(weights, self._state.held_digests())
        except SlotcarError as error:
            return error
        return None


def _tell(decision: str, digest: Digest, **fields: object) -> None:
    """For people who look closely; see docs/operations.md."""
    _log.debug(decision, extra={"fields": {"digest": digest.short, **fields}})
