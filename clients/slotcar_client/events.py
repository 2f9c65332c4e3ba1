"""What happens at a sidecar, as an iterator that can be closed."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import grpc
from slotcar.v1 import adapter_service_pb2

from slotcar_client import convert
from slotcar_client.errors import Unavailable, from_rpc_error
from slotcar_client.rpc import Rpc
from slotcar_client.values import Event, LayoutVersion


class EventReader:
    """Turns the messages, in order, into events that know how many were missed before them.

    `replayed` is how many events of the past come first.
    """

    def __init__(self) -> None:
        self._since: LayoutVersion | None = None
        self._missed = 0
        self.replayed = 0

    @property
    def since(self) -> LayoutVersion:
        """The version from which on nothing is hidden. Raises Unavailable when the stream ended before its greeting."""
        if self._since is None:
            raise Unavailable("the server ended the stream of events before it began")
        return self._since

    def take(self, message: adapter_service_pb2.WatchEventsResponse) -> Event | None:
        """The event of the message; None for the greeting."""
        if self._since is None:
            self._since, self.replayed = convert.version(message.layout), message.replayed
        self._missed += message.missed
        if not message.HasField("event"):
            return None
        missed, self._missed = self._missed, 0
        return convert.event(message, missed)


class EventStream:
    """Events without end: each `next` blocks until one comes, or until `close` from any thread.

    The first `replayed` of them are of the past; from `since` on none is hidden.
    """

    def __init__(self, rpc: Rpc, replay: int) -> None:
        """Subscribes, first to up to `replay` events of the past. Raises SlotcarError."""
        self._closed = False
        self._reader = EventReader()
        greeting = rpc.identified(lambda: self._subscribed(rpc, replay))
        if greeting is not None:
            self._reader.take(greeting)
        self.since: LayoutVersion = self._reader.since
        self.replayed: int = self._reader.replayed

    def _subscribed(self, rpc: Rpc, replay: int) -> adapter_service_pb2.WatchEventsResponse | None:
        self._call: Any = rpc.stream(adapter_service_pb2.WatchEventsRequest(replay=replay))
        return self._receive()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while (message := self._receive()) is not None:
            if (event := self._reader.take(message)) is not None:
                return event
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
            message: adapter_service_pb2.WatchEventsResponse | None = next(self._call, None)
        except grpc.RpcError as error:
            if self._closed:
                return None
            raise from_rpc_error(error) from error
        return message
