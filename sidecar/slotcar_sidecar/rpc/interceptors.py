"""Turns every error that leaves a handler into the error table's status, and counts how calls end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from slotcar_sidecar.core.errors import CapacityExceeded, InternalError, RequestInvalid, SlotcarError
from slotcar_sidecar.rpc.access import Access, Stream
from slotcar_sidecar.rpc.handlers import around
from slotcar_sidecar.rpc.messages import Messages
from slotcar_sidecar.rpc.status import CODES, DETAILS_KEY, to_status

_log = logging.getLogger("slotcar.rpc")

_NOTHING = nullcontext()

Count = Callable[[str, str], None]
"""Called with the method's name and how the call ended: "OK" or a row of the error table."""


class ErrorInterceptor(aio.ServerInterceptor):
    """Wraps slotcar's own services; health and reflection pass through, as they tell nothing of adapters and clients.

    With `access`, each call is admitted first.
    """

    def __init__(self, max_message_bytes: int, count: Count, access: Access | None = None) -> None:
        self._max_message_bytes = max_message_bytes
        self._count = count
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/slotcar."):
            return handler  # type: ignore[no-any-return]
        name = method.rpartition("/")[2]
        unary = partial(self._uploading if handler.request_streaming else self._unary, name)
        streaming = partial(self._streaming, name, reads_many=handler.request_streaming)
        return around(handler, unary, streaming, self._reader)  # type: ignore[no-any-return]

    def _reader(self, deserialize: Callable[[bytes], Message]) -> Callable[[bytes], Message | SlotcarError]:
        """Reads a request, or gives the refusal of its bytes: gRPC has no better place for it."""

        def read(data: bytes) -> Message | SlotcarError:
            if len(data) > self._max_message_bytes:
                return CapacityExceeded(
                    f"the message has {len(data)} bytes, the server accepts {self._max_message_bytes}: "
                    "send fewer rows in a call",
                    found=len(data),
                    wanted=self._max_message_bytes,
                )
            try:
                return deserialize(data)
            except DecodeError:
                return RequestInvalid("request", found=f"{len(data)} bytes that are no message", wanted="a message")

        return read

    def counted(self, name: str, error: Exception) -> SlotcarError:
        """Counts a refusal; see `counted`."""
        return counted(self._count, name, error)

    def _unary(self, name: str, handler: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            try:
                admitted = self._admitted(name, request, context)
                with self._lasting(admitted):
                    response = await handler(admitted, context)
            except Exception as error:
                self._refuse(name, error, context)
                return None
            self._count(name, "OK")
            return response

        return call

    def _uploading(self, name: str, handler: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        answer = self._unary(name, handler)

        async def call(_requests: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            messages = Messages(context)
            return await messages.run(answer(messages.each(), context))

        return call

    def _streaming(self, name: str, handler: Callable[[Any, Any], Any], *, reads_many: bool) -> Any:
        async def send(request: Any, context: aio.ServicerContext[Any, Any], messages: Messages) -> None:
            try:
                admitted = self._admitted(name, request, context)
                with self._lasting() as stream:
                    async with aclosing(handler(admitted, context)) as responses:
                        async for response in responses:
                            with stream.sending() if stream else _NOTHING:
                                await messages.write(response)
            except Exception as error:
                self._refuse(name, error, context)
            else:
                self._count(name, "OK")

        async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> None:
            messages = Messages(context)
            await messages.run(send(messages.each() if reads_many else request, context, messages))

        return call

    def _admitted(self, name: str, request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        """The request, or the stream of them, of a caller who may make the call. Raises SlotcarError."""
        access = self._access
        if access is None:
            return readable(request)
        access.admit(name, context)
        return access.checked(readable(request), name, context.peer())

    def _lasting(self, request: Any = None) -> AbstractContextManager[Stream | None]:
        """What ends a stream whose caller loses a right; a call with one request and one answer is let go on."""
        if self._access is None or isinstance(request, Message):
            return _NOTHING
        return self._access.lasting()

    def _refuse(self, name: str, error: Exception, context: aio.ServicerContext[Any, Any]) -> None:
        """Sets how the call ends when its handler returns.

        `context.abort` would keep the call in a circle, through the traceback of what it raises, until a collection.
        """
        known = self.counted(name, error)
        context.set_code(CODES[known.reason])
        context.set_details(known.message)
        context.set_trailing_metadata(((DETAILS_KEY, to_status(known).SerializeToString()),))


def counted(count: Count, name: str, error: Exception) -> SlotcarError:
    """Counts a refusal. Gives the error, or InternalError, with the fault in the log, for a fault of our own."""
    known = error if isinstance(error, SlotcarError) else InternalError()
    if known is not error:
        _log.error("fault in %s", name, exc_info=error)
    count(name, known.reason.value)
    return known


def readable(request: Any) -> Any:
    """The request, or the stream of them; raises the refusal that stands in the place of one that cannot be read."""
    if isinstance(request, SlotcarError):
        raise request
    return request
