"""One channel: its options, its stubs, and calls whose failures are the client's exceptions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio
from slotcar.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
    operator_service_pb2,
    operator_service_pb2_grpc,
)

from slotcar_client.credentials import Address, Metadata
from slotcar_client.effects import Call, Effect
from slotcar_client.errors import ClientClosed, RequestInvalid, Unauthenticated, from_rpc_error
from slotcar_client.tracing import trace_metadata
from slotcar_client.upload import Upload

T = TypeVar("T")

# A sidecar is near: try again soon after it went away. No proxy lies between, whatever the environment says.
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A new client connects at once, whatever another one of this process found a moment ago.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A server that is gone without a word is noticed while a call or a session's stream is open.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # No keepalive is sent while any other ping is unanswered, by default for a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Stubs:
    """The methods of all services, found by the type of their request: each has one of its own."""

    def __init__(self, channel: grpc.Channel | aio.Channel) -> None:
        self._by_request: dict[str, Any] = {}
        for stub, file in (
            (adapter_service_pb2_grpc.AdapterServiceStub(channel), adapter_service_pb2),
            (engine_service_pb2_grpc.EngineServiceStub(channel), engine_service_pb2),
            (operator_service_pb2_grpc.OperatorServiceStub(channel), operator_service_pb2),
        ):
            (service,) = file.DESCRIPTOR.services_by_name.values()
            for method in service.methods:
                self._by_request[method.input_type.full_name] = getattr(stub, method.name)

    def of(self, request: type[Message]) -> Any:
        return self._by_request[request.DESCRIPTOR.full_name]


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Failures of gRPC become SlotcarErrors."""
    try:
        yield
    except (ValueError, aio.UsageError) as error:
        # What gRPC says when another thread closed the channel just now.
        raise ClientClosed("the client is closed") from error
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def call_metadata(address: Address) -> Metadata | None:
    """What a call carries: who calls, and in which trace."""
    shown, trace = address.metadata(), trace_metadata()
    return (*(shown or ()), *(trace or ())) or None


class Rpc:
    """The stubs of one channel; `timeout_seconds` is the deadline of each call that is not a stream."""

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        """Raises RequestInvalid when a file of credentials cannot be read."""
        self.timeout_seconds = timeout_seconds
        self._address = address
        self._process = os.getpid()
        self._closed = False
        # With new certificates there is a new channel; what runs over an older one goes on.
        self._channels: list[grpc.Channel] = []
        self._stubs = self._connected()

    def _connected(self) -> Stubs:
        channel = self._address.channel(
            lambda target: grpc.insecure_channel(target, options=OPTIONS),
            lambda target, credentials: grpc.secure_channel(target, credentials, options=OPTIONS),
        )
        self._channels.append(channel)
        return Stubs(channel)

    def call(self, call: Call) -> Any:
        """The response, within the call's deadline. Raises SlotcarError."""
        return self.identified(lambda: self._call(call))

    def _call(self, call: Call) -> Any:
        with translated():
            method, seconds = self._method(type(call.request)), self.deadline_seconds(call)
            return method(call.request, timeout=seconds, metadata=call_metadata(self._address))

    def identified(self, attempt: Callable[[], T]) -> T:
        """The result of an attempt; of another, with a token, if the sidecar does not know who called."""
        refused = self._address.given_token
        try:
            return attempt()
        except Unauthenticated:
            if not self._address.identify(refused):
                raise
        return attempt()

    def perform(self, effect: Effect) -> Any:
        """The answer to an effect of a plan that only calls."""
        assert isinstance(effect, Call)
        return self.call(effect)

    def begin(self, call: Call) -> grpc.Future[Any]:
        """The same call as a future, which can be cancelled; it fails with gRPC's errors."""
        with translated():
            method, seconds = self._method(type(call.request)), self.deadline_seconds(call)
            future: grpc.Future[Any] = method.future(
                call.request, timeout=seconds, metadata=call_metadata(self._address)
            )
        return future

    def stream(self, request: Message) -> Any:
        """The answers to a request whose method streams them; a grpc.Call without a deadline."""
        with translated():
            return self._method(type(request))(request, metadata=self._address.metadata())

    def forward_stream(self, requests: Iterator[engine_service_pb2.ForwardStreamRequest]) -> Any:
        """The answers to a stream of Forwards; a grpc.Call without a deadline."""
        with translated():
            method = self._method(engine_service_pb2.ForwardStreamRequest)
            return method(requests, metadata=self._address.metadata())

    def upload(self, upload: Upload) -> adapter_service_pb2.LoadAdapterStreamResponse:
        """Sends an adapter's files. Raises SlotcarError, also for what was wrong with the files on the way."""
        return self.identified(lambda: self._upload(upload))

    def _upload(self, upload: Upload) -> adapter_service_pb2.LoadAdapterStreamResponse:
        with upload.checked(), translated():
            method = self._method(adapter_service_pb2.LoadAdapterStreamRequest)
            response: adapter_service_pb2.LoadAdapterStreamResponse = method(
                upload.requests(),
                timeout=self.timeout_seconds + upload.least_seconds,
                metadata=call_metadata(self._address),
            )
        return response

    def deadline_seconds(self, call: Call) -> float:
        return (call.timeout_seconds or self.timeout_seconds) + call.wait_seconds

    def check_usable(self) -> None:
        """Raises ClientClosed, also in a child of the process that connected: gRPC's threads are not there."""
        if self._closed:
            raise ClientClosed("the client is closed")
        if os.getpid() != self._process:
            raise ClientClosed("this client belongs to the parent process: connect again after a fork")

    def close(self) -> None:
        """Cancels what is under way. Idempotent."""
        self._closed = True
        for channel in self._channels:
            channel.close()
        self._address.close()

    def _method(self, request: type[Message]) -> Any:
        self.check_usable()
        if self._address.has_new_files():
            # A file that is missing for a moment is looked at again; the channel of before is as good till then.
            with contextlib.suppress(RequestInvalid):
                self._stubs = self._connected()
        return self._stubs.of(request)
