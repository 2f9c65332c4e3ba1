"""One channel: its options, its stubs, and calls whose failures are the client's exceptions."""

from __future__ import annotations

import os
from typing import TypeVar

import grpc
from slotcar.v1 import adapter_service_pb2_grpc, engine_service_pb2_grpc

from slotcar_client.errors import Unavailable, from_rpc_error

Request = TypeVar("Request")
Response = TypeVar("Response")

# A sidecar is near: try again soon after it went away. No proxy lies between, whatever the environment says.
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A new client connects at once, whatever another one of this process found a moment ago.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A server that is gone without a word is noticed while a call or a session's stream is open.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # No keepalive is sent while any other ping is unanswered, by default for a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Rpc:
    """The stubs of one channel; `timeout_seconds` is the deadline of each call that is not a stream."""

    def __init__(self, target: str, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._process = os.getpid()
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self.adapters = adapter_service_pb2_grpc.AdapterServiceStub(self._channel)
        self.engine = engine_service_pb2_grpc.EngineServiceStub(self._channel)

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout_seconds: float | None = None,
    ) -> Response:
        """The answer, by default within the deadline of the channel's calls. Raises SlotcarError."""
        self.check_usable()
        try:
            return method(request, timeout=timeout_seconds or self.timeout_seconds)
        except ValueError as error:
            raise Unavailable("the client is closed") from error
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def check_usable(self) -> None:
        """Raises Unavailable in a child of the process that connected: gRPC's threads are not there."""
        if os.getpid() != self._process:
            raise Unavailable("this client belongs to the parent process: connect again after a fork")

    def close(self) -> None:
        """Cancels what is under way. Idempotent."""
        self._channel.close()
