"""Forward over one long-lived ForwardStream.

Invariant: a living stream has no unread answer between two calls. A call that ends in any other way than with its
answer cancels the stream, so that no later call can read an answer that is not its own.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
from slotcar.v1 import engine_service_pb2

from slotcar_client.effects import Call, Forward
from slotcar_client.errors import DeadlineExceeded, InternalError, Unavailable, from_message, from_rpc_error
from slotcar_client.rpc import Rpc
from slotcar_client.transports.watchdog import Watchdog

if TYPE_CHECKING:
    import torch

_Request = engine_service_pb2.ForwardStreamRequest
_Response = engine_service_pb2.ForwardStreamResponse


class StreamTransport:
    name = "stream"

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._open: _OpenStream | None = None
        self._session = ""
        self._watchdog = Watchdog(rpc.timeout_seconds)

    def use(self, opened: engine_service_pb2.SessionOpened) -> None:
        """A new session begins with a new stream: a proxy before a pool leaves an old one at its sidecar."""
        if self._session not in ("", opened.session):
            self._end()
        self._session = opened.session

    def send(self, forward: Forward) -> None:
        """A call ends before the next begins."""

    def forward(self, forward: Forward) -> dict[str, torch.Tensor]:
        from slotcar_client import torch_tensors

        outgoing = torch_tensors.to_request(forward)
        response = self._rpc.identified(lambda: self._ask(outgoing.request))
        return torch_tensors.to_outputs(forward, outgoing, response)

    def call(self, call: Call) -> Any:
        return self._rpc.call(call)

    def _ask(self, request: engine_service_pb2.ForwardRequest) -> engine_service_pb2.ForwardResponse:
        if self._open is None or not self._open.alive:
            self._open = _OpenStream(self._rpc)
        stream = self._open
        with self._watchdog.watch(stream.cancel) as watch:
            try:
                response = stream.ask(request)
            except grpc.RpcError as error:
                stream.cancel()
                if watch.expired:
                    raise DeadlineExceeded(f"no answer within {self._rpc.timeout_seconds:g} s") from error
                raise from_rpc_error(error) from error
            except BaseException:
                stream.cancel()
                raise
        kind = response.WhichOneof("result")
        if kind == "forward":
            return response.forward
        if kind == "error":
            raise from_message(response.error)
        raise InternalError("the stream's answer has neither a result nor an error")

    def close(self) -> None:
        self._end()
        self._watchdog.close()

    def _end(self) -> None:
        if self._open is not None:
            self._open.cancel()
            self._open = None


class _OpenStream:
    """One ForwardStream with the queue that feeds it."""

    def __init__(self, rpc: Rpc) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._call: Any = rpc.forward_stream(self._feed())

    @property
    def alive(self) -> bool:
        return bool(self._call.is_active())

    def ask(self, request: engine_service_pb2.ForwardRequest) -> _Response:
        self._requests.put(_Request(forward=request))
        try:
            response: _Response = next(self._call)
        except StopIteration:
            raise Unavailable("the server ended the stream of Forwards") from None
        return response

    def cancel(self) -> None:
        """Ends the stream and the thread that gRPC reads the queue with. Idempotent."""
        self._call.cancel()
        self._requests.put(None)

    def _feed(self) -> Iterator[_Request]:
        while (request := self._requests.get()) is not None:
            yield request
