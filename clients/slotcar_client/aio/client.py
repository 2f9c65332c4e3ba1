"""The operator's and the engine's way in for asyncio: one channel to one sidecar."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Self, TypeVar, Unpack

from slotcar_client import convert, verbs
from slotcar_client.aio.events import AsyncEventStream
from slotcar_client.aio.rpc import AsyncRpc, run
from slotcar_client.aio.session import AsyncSession
from slotcar_client.client import DEFAULT_TIMEOUT_SECONDS, address
from slotcar_client.credentials import Address, Credentials
from slotcar_client.effects import Plan
from slotcar_client.options import SessionOptions, SessionSettings, checked_timeout
from slotcar_client.upload import Upload
from slotcar_client.values import (
    AdapterInfo,
    Capacity,
    DesiredSet,
    Estimate,
    LoadReport,
    Prefetched,
    SessionInfo,
    Settings,
    Snapshot,
    UnloadReport,
)

T = TypeVar("T")


def connect(
    target: str | None = None,
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    credentials: Credentials | None = None,
    affinity: str = "",
) -> AsyncClient:
    """As `slotcar_client.connect`; the client belongs to the running event loop."""
    return AsyncClient(address(target, credentials, affinity), checked_timeout(timeout_seconds))


class AsyncClient:
    """Made by `connect`; open until `close` or the end of `async with`. Each method is that of `Client`."""

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        self.target = address.target
        self._rpc = AsyncRpc(address, timeout_seconds)
        self._sessions: weakref.WeakSet[AsyncSession] = weakref.WeakSet()

    async def load(
        self,
        name: str,
        source: str | os.PathLike[str] | None = None,
        *,
        replace: bool = False,
        keep: bool = False,
        digest: str | None = None,
        tier: str = "device",
    ) -> LoadReport:
        request = verbs.load_request(name, source, digest, replace=replace, keep=keep, tier=tier)
        return await self._run(verbs.load(request))

    async def upload(
        self,
        name: str,
        folder: str | os.PathLike[str],
        *,
        replace: bool = False,
        keep: bool = False,
        digest: str | None = None,
        tier: str = "device",
    ) -> LoadReport:
        header = verbs.upload_header(name, digest, replace=replace, keep=keep, tier=tier)
        with Upload(folder, header) as upload:
            return convert.load_report(await self._rpc.upload(upload))

    async def unload(self, ref: str, *, force: bool = False) -> UnloadReport:
        return await self._run(verbs.unload(ref, force))

    async def keep(self, ref: str) -> AdapterInfo:
        return await self._run(verbs.keep(ref))

    async def release_keep(self, ref: str) -> AdapterInfo:
        return await self._run(verbs.release_keep(ref))

    async def get(self, ref: str) -> AdapterInfo:
        return await self._run(verbs.get(ref))

    async def list(self) -> tuple[AdapterInfo, ...]:
        return (await self.snapshot()).adapters

    async def snapshot(self) -> Snapshot:
        return await self._run(verbs.snapshot())

    async def estimate(self, source: str | os.PathLike[str]) -> Estimate:
        return await self._run(verbs.estimate(source))

    async def prefetch(self, refs: Iterable[str], *, tier: str = "device") -> tuple[Prefetched, ...]:
        return await self._run(verbs.prefetch(refs, tier))

    async def desired(self) -> DesiredSet:
        return await self._run(verbs.desired())

    async def capacity(self) -> Capacity:
        return await self._run(verbs.capacity())

    async def sessions(self) -> tuple[SessionInfo, ...]:
        return await self._run(verbs.sessions())

    async def end_session(self, session: str) -> bool:
        return await self._run(verbs.end_session(session))

    async def settings(self) -> Settings:
        return await self._run(verbs.settings())

    async def set_log_level(self, level: str) -> str:
        return await self._run(verbs.set_log_level(level))

    async def shut_down(self, deadline_seconds: float | None = None) -> float:
        return await self._run(verbs.shut_down(deadline_seconds))

    def events(self, replay: int = 0) -> AsyncEventStream:
        return AsyncEventStream(self._rpc, replay)

    def session(self, name: str = "python", **settings: Unpack[SessionSettings]) -> AsyncSession:
        """A session that `async with` opens. Its Forwards are unary calls; it has no transport in shared memory."""
        session = AsyncSession(self._rpc, SessionOptions(name, **settings))
        self._sessions.add(session)
        return session

    async def close(self) -> None:
        """Closes the sessions, then the channel. Idempotent."""
        for session in tuple(self._sessions):
            await session.close()
        await self._rpc.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, plan: Plan[T]) -> T:
        return await run(plan, self._rpc.perform)
