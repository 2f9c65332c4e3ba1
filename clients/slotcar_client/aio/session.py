"""A session for asyncio: performs the plans of SessionState, one call at a time.

The lock is free while a call only waits: for the server to be back, for slots, or for `on_stale`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Mapping as ReadOnlyDict
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from grpc import aio
from slotcar.v1 import engine_service_pb2, model_pb2

from slotcar_client import verbs
from slotcar_client.aio.rpc import AsyncRpc, async_translated, performed, run
from slotcar_client.effects import Advance, Call, Effect, Forward, Open, Plan, Stale, Wait
from slotcar_client.entries import Entry
from slotcar_client.errors import (
    CallCancelled,
    DeadlineExceeded,
    SessionClosed,
    SessionNotFound,
    SlotcarError,
    Unavailable,
)
from slotcar_client.options import IN_BAND, SessionOptions, one_of
from slotcar_client.session_state import DEFAULT_MAPPING_ID, SessionState
from slotcar_client.stream_state import StreamState
from slotcar_client.values import Held, Layout, Mapping, ServerInfo

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class AsyncHold(Held):
    """Made by `AsyncSession.hold`; `async with await session.hold(ref) as hold` releases it at the end."""

    _session: AsyncSession = field(repr=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(SlotcarError):
            await self._session.release_hold(self)


class AsyncSession:
    """Made by `AsyncClient.session`; open inside of `async with`. Each method is that of `slotcar_client.Session`."""

    def __init__(self, rpc: AsyncRpc, options: SessionOptions) -> None:
        one_of("transport", options.transport, IN_BAND)
        self._rpc = rpc
        self._state = SessionState(options, time.monotonic)
        self._lock = asyncio.Lock()
        self._closed = asyncio.Event()
        self._queued: set[Any] = set()
        self._stream: _Stream | None = None

    @property
    def session_id(self) -> str:
        return self._state.session_id

    @property
    def server(self) -> ServerInfo:
        return self._state.server

    @property
    def model_spec(self) -> model_pb2.ModelSpec | None:
        return self._state.model_spec

    @property
    def layout(self) -> Layout:
        assert self._stream is not None
        return self._stream.layout

    @property
    def recoveries(self) -> dict[str, int]:
        return dict(self._state.recoveries)

    @property
    def mapping(self) -> Mapping | None:
        return self._state.mapping

    async def set_mapping(
        self,
        entries: Iterable[Entry],
        *,
        mapping_id: int = DEFAULT_MAPPING_ID,
        load: bool = False,
        wait_seconds: float = 0.0,
    ) -> Mapping:
        return await self._run(self._state.set_mapping(entries, mapping_id, load, wait_seconds))

    async def release_mapping(self, mapping: Mapping | None = None) -> None:
        with contextlib.suppress(SessionClosed):
            await self._run(self._state.release_mapping(mapping))

    async def forward(
        self,
        inputs: ReadOnlyDict[str, torch.Tensor],
        row_counts: Sequence[int] | None = None,
        base: ReadOnlyDict[str, torch.Tensor] | None = None,
        *,
        aux: ReadOnlyDict[str, torch.Tensor] | None = None,
        mapping: Mapping | None = None,
    ) -> dict[str, torch.Tensor]:
        return await self._run(self._state.forward(inputs, row_counts, base, mapping, aux))

    async def hold(
        self, ref: str, *, hold_id: int | None = None, seconds: float | None = None, slot: bool = False
    ) -> AsyncHold:
        return await self._run(self._state.hold(ref, hold_id, seconds, slot, self._hold))

    async def load_held(
        self,
        name: str,
        source: str | os.PathLike[str] | None = None,
        *,
        digest: str | None = None,
        seconds: float | None = None,
        slot: bool = False,
        tier: str = "device",
    ) -> AsyncHold:
        request = verbs.load_request(name, source, digest, tier=tier)
        return await self._run(self._state.load_held(request, seconds, slot, self._hold))

    async def release_hold(self, hold: Held) -> None:
        with contextlib.suppress(SessionNotFound):
            await self._run(self._state.release_hold(hold))

    async def fence(self) -> None:
        await self._run(self._state.fence())

    async def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        for call in tuple(self._queued):
            call.cancel()
        async with self._lock:
            await run(self._state.close(), self._rpc.perform)
        if self._stream is not None:
            await self._stream.close()

    async def __aenter__(self) -> Self:
        try:
            await self._run(self._state.open())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _hold(self, hold_id: int, ref: str, tier: str) -> AsyncHold:
        return AsyncHold(hold_id, ref, tier, self)

    # How plans are run

    async def _run(self, plan: Plan[T]) -> T:
        advance: Advance = partial(next, plan)
        try:
            while True:
                async with self._lock:
                    self._check_open()
                    while not (effect := advance()).lends:
                        advance = await performed(plan, self._perform, effect)
                advance = await performed(plan, self._perform, effect)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _perform(self, effect: Effect) -> Any:
        match effect:
            case Call():
                if effect.lends:
                    return await self._rpc.identified(lambda: self._queue(effect))
                return await self._rpc.call(effect)
            case Forward():
                return await self._forward(effect)
            case Open():
                return await self._open(effect.request)
            case Wait():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), effect.seconds)
                self._check_open()
            case Stale():
                if self._state.options.on_stale is not None:
                    self._state.options.on_stale(effect.mapping, effect.error)
        return None

    async def _forward(self, forward: Forward) -> dict[str, torch.Tensor]:
        from slotcar_client import torch_tensors

        outgoing = torch_tensors.to_request(forward)
        return torch_tensors.to_outputs(forward, outgoing, await self._rpc.call(Call(outgoing.request)))

    async def _queue(self, effect: Call) -> Any:
        """A call that the server may queue, which `close` cancels."""
        self._check_open()
        call = self._rpc.begin(effect)
        self._queued.add(call)
        try:
            with async_translated():
                return await call
        except CallCancelled:
            self._check_open()
            raise
        finally:
            self._queued.discard(call)

    async def _open(
        self, request: engine_service_pb2.OpenSessionRequest | engine_service_pb2.JoinSessionRequest
    ) -> engine_service_pb2.SessionOpened:
        stream = await self._rpc.identified(lambda: _Stream.open(self._rpc, request, self._resume))
        if self._stream is not None:
            self._stream.cancel()
        self._stream = stream
        return stream.opened

    async def _resume(self, ended: _Stream) -> None:
        """Called in the stream's task when it ended."""
        if self._stream is ended:
            with contextlib.suppress(SlotcarError):
                await self._run(self._state.resume())

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise SessionClosed("the session is closed")


class _Stream(StreamState):
    """One OpenSession stream, read by one task for as long as it lives; then `on_end` is awaited in that task."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, rpc: AsyncRpc, request: Any, on_end: Callable[[_Stream], Awaitable[None]]) -> _Stream:
        """Waits for the first message. Raises SlotcarError."""
        stream = cls(rpc.stream(request))
        try:
            async with asyncio.timeout(rpc.timeout_seconds):
                await stream._receive()
        except BaseException as error:
            stream.cancel()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no session within {rpc.timeout_seconds:g} s") from error
            raise
        stream._task = asyncio.create_task(stream._read(on_end), name="slotcar-session")
        return stream

    def cancel(self) -> None:
        """Ends the stream from this side. Idempotent."""
        self._call.cancel()

    async def close(self) -> None:
        """Ends the stream and waits for its task."""
        self.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            await self._task

    async def _read(self, on_end: Callable[[_Stream], Awaitable[None]]) -> None:
        with contextlib.suppress(SlotcarError):
            while True:
                await self._receive()
        self.cancel()
        await on_end(self)

    async def _receive(self) -> None:
        with async_translated():
            message = await self._call.read()
        if message is aio.EOF:
            raise Unavailable("the server ended the session's stream")
        self.take(message)
