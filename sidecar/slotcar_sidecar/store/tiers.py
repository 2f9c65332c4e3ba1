"""The tiers above the device as one: memory first, then the disk, then the source, where equal reads are joined."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from slotcar_sidecar.core import ports
from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.errors import DigestMismatch, SourceUnavailable
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.ports import DiskTier, Environment, HostAdapter, HostTier, Source
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.upload import Upload

T = TypeVar("T")


class StoreTiers:
    """Implements core.ports.Tiers: reads in the pools, all else on the event loop's thread.

    Reads of a source are joined only while the files are the same by identity, size and times, so that a caller who has
    just written new bytes never gets the old.
    """

    def __init__(
        self,
        source: Source,
        host: HostTier,
        disk: DiskTier,
        environment: Environment,
        max_adapter_bytes: int,
        base: BaseModel | None = None,
    ) -> None:
        self.host = host
        self.disk = disk
        self._max_adapter_bytes = max_adapter_bytes
        self._base = base
        self._source = source
        self._environment = environment
        self._reads: dict[Hashable, asyncio.Task[Any]] = {}

    # Where bytes come from

    async def canonical(self, uri: str) -> str:
        return await self._run(self._source.canonical, uri)

    def is_remote(self, uri: str) -> bool:
        return self._source.is_remote(uri)

    async def version(self, uri: str) -> Hashable:
        return await self._run(self._source.version, uri)

    def from_host(self, digest: Digest) -> HostAdapter | None:
        weights = self.host.get(digest)
        self._looked_up("host", weights)
        if weights is not None:
            self.disk.touch(digest)
        return weights

    async def from_disk(self, digest: Digest, uri: str) -> HostAdapter | None:
        weights = await self._joined(("disk", digest), self._read_disk, digest)
        if self.disk.capacity_bytes:
            self._looked_up("disk", weights)
        # The entry may be another sidecar's, with a source that this one cannot read.
        return None if weights is None else _from(weights, uri)

    async def from_source(self, uri: str, wanted: Digest | None) -> HostAdapter:
        if not uri:
            raise SourceUnavailable(
                f"{wanted} was uploaded, and neither memory nor the disk tier has it any more: upload it again",
                digest=wanted,
            )
        version = await self._run(self._source.version, uri)
        weights: HostAdapter = await self._joined((uri, version), self._read_source, uri)
        if wanted is not None and weights.adapter.digest != wanted:
            raise DigestMismatch(uri, found=weights.adapter.digest, wanted=wanted)
        return weights

    def begin_upload(self, config_bytes: int, weights_bytes: int) -> ports.Upload:
        return Upload(config_bytes, weights_bytes, self._max_adapter_bytes, self._base)

    async def from_upload(self, upload: ports.Upload, wanted: Digest | None) -> HostAdapter:
        return await asyncio.get_running_loop().run_in_executor(self._environment.load_pool, upload.finish, wanted)

    # Where bytes go

    def save(self, weights: HostAdapter, *, only: bool) -> asyncio.Future[None]:
        return self.disk.save(weights, only=only)

    def forget(self, digest: Digest) -> None:
        self.host.drop(digest)
        self.disk.forget(digest)

    async def adopt(self, sources: Mapping[Digest, str]) -> Mapping[Digest, Adapter]:
        found = await self.disk.adopt({digest: not uri for digest, uri in sources.items()})
        return {digest: dataclasses.replace(found[digest], source=sources[digest]) for digest in found}

    # Steps

    def _looked_up(self, tier: str, found: HostAdapter | None) -> None:
        self._environment.observer.looked_up(tier, hits=int(found is not None), misses=int(found is None))

    async def _joined(self, key: Hashable, read: Callable[..., Any], argument: object) -> Any:
        """What `read` gives, once for all who ask while it reads."""
        task = self._reads.get(key)
        if task is None:
            task = self._reads[key] = asyncio.create_task(read(argument))
            task.add_done_callback(lambda _: self._reads.pop(key, None))
        try:
            return await asyncio.shield(task)
        finally:
            del task  # its error's traceback leads to this frame

    async def _read_disk(self, digest: Digest) -> HostAdapter | None:
        start = self._environment.clock()
        weights = await self.disk.read(digest)
        if weights is not None:
            self._environment.observer.load_stage("read", self._environment.clock() - start, digest)
        return weights

    async def _read_source(self, uri: str) -> HostAdapter:
        start = self._environment.clock()
        weights = await self._run(self._source.read, uri)
        self._environment.observer.load_stage("read", self._environment.clock() - start, weights.adapter.digest)
        return weights

    async def _run(self, call: Callable[[str], T], uri: str) -> T:
        """Slow sources have threads of their own, so that others never wait for them."""
        return await asyncio.get_running_loop().run_in_executor(self._pool_for(uri), call, uri)

    def _pool_for(self, uri: str) -> Executor:
        environment = self._environment
        return environment.remote_pool if self._source.is_remote(uri) else environment.load_pool


def _from(weights: HostAdapter, uri: str) -> HostAdapter:
    """The same adapter, known to be loaded again from `uri`."""
    if weights.adapter.source == uri:
        return weights
    adapter = dataclasses.replace(weights.adapter, source=uri)
    return dataclasses.replace(weights, adapter=adapter)  # type: ignore[type-var]
