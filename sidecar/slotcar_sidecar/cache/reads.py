"""Verified bytes for whoever loads, from the nearest tier that has them.

Invariant: weights that are read and not yet in the host tier are few. Those that come over a network have places of
their own, so that slow sources never hold up what is near.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import DigestMismatch
from slotcar_sidecar.core.ids import AdapterRef, Digest
from slotcar_sidecar.core.ports import HostAdapter, Upload

_MAX_NEAR = 4
_MAX_FAR = 4


class Reads:
    """Each method is a context: while it is open, its weights have a place."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._near = asyncio.Semaphore(_MAX_NEAR)
        self._far = asyncio.Semaphore(_MAX_FAR)

    @contextlib.asynccontextmanager
    async def of_call(self, call: LoadCall) -> AsyncIterator[tuple[HostAdapter, str | None]]:
        """What a call wants, and its source unless the bytes were known from elsewhere."""
        if call.upload is not None:
            async with self._of_upload(call.upload, call.ref.digest) as weights:
                yield weights, None
        elif call.source is None:
            async with self.of_ref(call.ref) as weights:
                yield weights, None
        else:
            # An upload that is to come back from the disk has no source, not even a wrong one.
            uri = await self._state.tiers.canonical(call.source) if call.source else ""
            wanted = call.ref.digest
            async with self._verified(lambda: (uri, None if call.must_read else wanted)) as weights:
                if wanted not in (None, weights.adapter.digest):
                    raise DigestMismatch(uri, found=weights.adapter.digest, wanted=wanted)
                yield weights, uri if weights.adapter.source == uri else None

    @contextlib.asynccontextmanager
    async def of_ref(self, ref: AdapterRef) -> AsyncIterator[HostAdapter]:
        """The bytes of a digest that is known."""
        names, host = self._state.residency.names, self._state.tiers.host

        def find() -> tuple[str, Digest]:
            digest = ref.digest or names.digest_of(ref)
            # A load that was refused may have left bytes in memory that no name leads to.
            return "" if digest in host else names.source_of(ref), digest

        async with self._verified(find) as weights:
            yield weights

    @contextlib.asynccontextmanager
    async def of_source(self, source: str) -> AsyncIterator[HostAdapter]:
        """What a source has now."""
        uri = await self._state.tiers.canonical(source)
        async with self._verified(lambda: (uri, None)) as weights:
            yield weights

    @contextlib.asynccontextmanager
    async def _of_upload(self, upload: Upload, wanted: Digest | None) -> AsyncIterator[HostAdapter]:
        async with self._near:
            yield await self._timed(self._state.tiers.from_upload(upload, wanted))

    @contextlib.asynccontextmanager
    async def _verified(self, find: Callable[[], tuple[str, Digest | None]]) -> AsyncIterator[HostAdapter]:
        """`find` gives the source and, if it is known, the digest; it is called when there is a place."""
        tiers = self._state.tiers
        async with self._near:
            uri, digest = find()
            weights = await self._nearby(uri, digest) if digest is not None else None
            if weights is None and not tiers.is_remote(uri):
                weights = await self._timed(tiers.from_source(uri, digest))
            if weights is not None:
                yield weights
                return
        async with self._far:
            yield await self._timed(tiers.from_source(uri, digest))

    async def _nearby(self, uri: str, digest: Digest) -> HostAdapter | None:
        tiers, start = self._state.tiers, self._state.now()
        weights = tiers.from_host(digest)
        if weights is None:
            # A source that is not read now takes no other's place: it may not have these bytes.
            known = self._state.residency.names.find(digest)
            weights = await tiers.from_disk(digest, uri if known is None else known.source)
            if weights is not None:
                self._was_read(weights, start)
        return weights

    async def _timed(self, reading: Awaitable[HostAdapter]) -> HostAdapter:
        start = self._state.now()
        weights = await reading
        self._was_read(weights, start)
        return weights

    def _was_read(self, weights: HostAdapter, start: float) -> None:
        """How long it took is remembered for the choice of who gives way."""
        costs = self._state.residency.slots.uses.costs
        costs.was_read(weights.adapter.digest, weights.adapter.bytes, self._state.now() - start)
