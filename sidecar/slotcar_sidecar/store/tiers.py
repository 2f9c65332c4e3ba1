"""The tiers above the device as one: the host tier first, then the source, where equal reads are joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from typing import TypeVar

from slotcar_sidecar.core import ports
from slotcar_sidecar.core.errors import DigestMismatch
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.ports import HostAdapter, HostTier, Observer, Source
from slotcar_sidecar.store.upload import Upload

T = TypeVar("T")


class SourceAndHost:
    """Implements core.ports.Tiers: reads in the loader pool, all else on the event loop's thread.

    Reads are joined only while the files are the same by identity, size and times, so that a caller who has just
    written new bytes never gets the old.
    """

    def __init__(
        self,
        source: Source,
        host: HostTier,
        max_adapter_bytes: int,
        pool: Executor,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self.host = host
        self._max_adapter_bytes = max_adapter_bytes
        self._source = source
        self._pool = pool
        self._observer = observer
        self._clock = clock
        self._reads: dict[Hashable, asyncio.Task[HostAdapter]] = {}

    async def canonical(self, uri: str) -> str:
        return await self._run(self._source.canonical, uri)

    def from_host(self, digest: Digest) -> HostAdapter | None:
        weights = self.host.get(digest)
        self._observer.host_lookup(hit=weights is not None)
        return weights

    async def from_source(self, uri: str, wanted: Digest | None) -> HostAdapter:
        key = (uri, await self._run(self._source.version, uri))
        read = self._reads.get(key)
        if read is None:
            read = self._reads[key] = asyncio.create_task(self._read(uri))
            read.add_done_callback(lambda _: self._reads.pop(key, None))
        try:
            weights = await asyncio.shield(read)
        finally:
            del read  # its error's traceback leads to this frame
        if wanted is not None and weights.adapter.digest != wanted:
            raise DigestMismatch(uri, found=weights.adapter.digest, wanted=wanted)
        return weights

    def begin_upload(self, config_bytes: int, weights_bytes: int) -> ports.Upload:
        return Upload(config_bytes, weights_bytes, self._max_adapter_bytes)

    async def from_upload(self, upload: ports.Upload, wanted: Digest | None) -> HostAdapter:
        return await asyncio.get_running_loop().run_in_executor(self._pool, upload.finish, wanted)

    async def _read(self, uri: str) -> HostAdapter:
        start = self._clock()
        weights = await self._run(self._source.read, uri)
        self._observer.load_stage("read", self._clock() - start)
        return weights

    async def _run(self, call: Callable[[str], T], uri: str) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, uri)
