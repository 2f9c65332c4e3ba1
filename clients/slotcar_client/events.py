"""What happens at a sidecar, as an iterator that can be closed."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import grpc
from slotcar.v1 import adapter_service_pb2

from slotcar_client import convert
from slotcar_client.errors import SlotcarError, Unavailable, from_rpc_error
from slotcar_client.rpc import Rpc
from slotcar_client.values import Event, LayoutVersion


class EventStream:
    """Events from `since` on, without end: each `next` blocks until one comes, or until `close` from any thread."""

    def __init__(self, rpc: Rpc, replay: int) -> None:
        """Subscribes, first to up to `replay` events of the past. Raises SlotcarError."""
        self._closed = False
        self._call = rpc.stream(adapter_service_pb2.WatchEventsRequest(replay=replay))
        greeting = self._receive()
        if greeting is None:
            raise Unavailable("the server ended the stream of events before it began")
        self.since: LayoutVersion = convert.version(greeting.layout)
        self._missed = greeting.missed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while (message := self._receive()) is not None:
            self._missed += message.missed
            if message.HasField("event"):
                missed, self._missed = self._missed, 0
                return convert.event(message, missed)
        raise StopIteration

    def close(self) -> None:
        """Ends the subscription. Idempotent."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self) -> adapter_service_pb2.WatchEventsResponse | None:
        """The next message, or None at the end. Raises SlotcarError unless the end was asked for."""
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            if self._closed:
                return None
            failure: SlotcarError = from_rpc_error(error)
            raise failure from error
