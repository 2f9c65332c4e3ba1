"""Prefetch: brings adapters nearer before anybody asks for them, at nobody's cost.

Invariants: it takes only slots that are free, or that nobody protects or used since its call came, and so none twice;
it never goes before a call that waits; in memory, what it brought does not give way to what it brings next. It brings
one adapter at a time, for one call after the other, so that a load that somebody waits for is behind at most one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from slotcar_sidecar.cache.loads import Loads
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.calls import PrefetchCall, Prefetched
from slotcar_sidecar.core.errors import AdapterNotFound, CapacityExceeded, ModelUnknown, ShuttingDown, SlotcarError
from slotcar_sidecar.core.ids import AdapterRef, Digest
from slotcar_sidecar.core.slots import Claim, Demand

_MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class _Wish:
    """How near a call wants its adapters, the moment it came, and what it brought into memory so far."""

    in_slot: bool
    on_disk: bool
    came: int
    brought: set[Digest] = field(default_factory=set)


class Prefetches:
    """Prefetches under way, and in what order."""

    def __init__(self, state: State, loads: Loads) -> None:
        self._state = state
        self._loads = loads
        self._turn = asyncio.Lock()
        self._calls = 0

    async def prefetch(self, call: PrefetchCall) -> tuple[Prefetched, ...]:
        """Brings each as near as it can; goes on when the caller goes away. Raises only if it does nothing at all."""
        state = self._state
        if state.shutting_down:
            raise ShuttingDown
        state.limits.check_entries("refs", len(call.refs))
        state.check_target(on_disk=call.on_disk)
        if self._calls >= _MAX_CALLS:
            raise CapacityExceeded("other prefetches are under way", found=self._calls, wanted=_MAX_CALLS)
        self._calls += 1
        return await state.outliving(self._run(call))

    async def _run(self, call: PrefetchCall) -> tuple[Prefetched, ...]:
        wish = _Wish(call.in_slot, call.on_disk, self._state.residency.slots.uses.now)
        try:
            async with self._turn:
                ends = {ref: await self._bring(ref, wish) for ref in dict.fromkeys(call.refs)}
            return tuple(self._end(ref, ends[ref]) for ref in call.refs)
        finally:
            self._calls -= 1
            self._state.publish()

    async def _bring(self, ref: AdapterRef, wish: _Wish) -> SlotcarError | None:
        """As near as that goes; returns what kept it from being nearer."""
        state, residency = self._state, self._state.residency
        claim = Claim(None, slot=False, bytes=not wish.on_disk)
        try:
            if state.shutting_down:
                raise ShuttingDown
            digest = residency.names.digest_of(ref)
        except SlotcarError as error:
            return error
        residency.claim(digest, claim)
        try:
            await self._fetch(AdapterRef(ref.name, digest), wish)
        except SlotcarError as error:
            return error
        finally:
            residency.unclaim(digest, claim)
        return None

    async def _fetch(self, ref: AdapterRef, wish: _Wish) -> None:
        state, residency, digest = self._state, self._state.residency, ref.digest
        assert digest is not None
        slot = residency.readable_slot(digest)
        if wish.in_slot and slot is not None:
            residency.slots.uses.touch((slot,))
            return
        if wish.on_disk:
            await self._to_disk(ref)
            return
        weights = await self._loads.bytes_of(ref, wish.brought)
        wish.brought.add(digest)
        if not wish.in_slot:
            return
        if state.model is None:
            raise ModelUnknown
        if state.layout.find(digest) is None:
            residency.slots.check(Demand(str(ref.name), None, residency.pins, 1))
            self._loads.begin(weights, ref.name, "prefetch", wish.came)
        await self._loads.filled(digest)

    async def _to_disk(self, ref: AdapterRef) -> None:
        tiers, digest = self._state.tiers, ref.digest
        assert digest is not None
        if digest in tiers.disk:
            return
        was_in_memory = digest in tiers.host
        await self._loads.save(await self._loads.bytes_of(ref))
        if digest not in tiers.disk:
            raise CapacityExceeded("the disk tier did not take it", tier="DISK", wanted=tiers.disk.capacity_bytes)
        if not was_in_memory:
            self._loads.leave_memory(digest)

    def _end(self, ref: AdapterRef, refusal: SlotcarError | None) -> Prefetched:
        """Where the adapter is at the end of the call, which may be no nearer than at its beginning."""
        try:
            return Prefetched(ref, self._state.residency.describe(ref), refusal)
        except AdapterNotFound as error:
            return Prefetched(ref, None, refusal or error)
