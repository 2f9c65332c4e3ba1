"""What happens at a sidecar, as an asynchronous iterator that can be closed."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from grpc import aio
from slotcar.v1 import adapter_service_pb2

from slotcar_client.aio.rpc import AsyncRpc, async_translated
from slotcar_client.errors import SlotcarError
from slotcar_client.events import EventReader
from slotcar_client.values import Event, LayoutVersion


class AsyncEventStream:
    """Events without end, until `close`. As a context it is subscribed, and has its `since`, when the block begins."""

    def __init__(self, rpc: AsyncRpc, replay: int) -> None:
        self._closed = False
        self._reader = EventReader()
        self._rpc = rpc
        self._replay = replay
        self._subscribe()

    @property
    def since(self) -> LayoutVersion:
        """The layout version from which on nothing is hidden. Raises Unavailable before the first message."""
        return self._reader.since

    @property
    def replayed(self) -> int:
        """How many events of the past come first."""
        return self._reader.replayed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while (message := await self._receive()) is not None:
            if (event := self._reader.take(message)) is not None:
                return event
        raise StopAsyncIteration

    def close(self) -> None:
        """Ends the subscription. Idempotent."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        greeting = await self._rpc.identified(self._greeted)
        if greeting is not None:
            self._reader.take(greeting)
        _ = self.since
        return self

    def _subscribe(self) -> None:
        self._call: Any = self._rpc.stream(adapter_service_pb2.WatchEventsRequest(replay=self._replay))

    async def _greeted(self) -> adapter_service_pb2.WatchEventsResponse | None:
        """The first message; over a new call when the one before was refused."""
        if self._call.done():
            self._subscribe()
        return await self._receive()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _receive(self) -> adapter_service_pb2.WatchEventsResponse | None:
        """The next message, or None at the end. Raises SlotcarError unless the end was asked for."""
        try:
            with async_translated():
                message = await self._call.read()
        except SlotcarError:
            if self._closed:
                return None
            raise
        return None if message is aio.EOF else message
