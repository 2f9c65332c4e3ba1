"""One asyncio channel, with the options and the failures of the other face's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc import aio
from slotcar.v1 import adapter_service_pb2

from slotcar_client.credentials import Address
from slotcar_client.effects import Advance, Call, Effect, Plan
from slotcar_client.errors import CallCancelled, RequestInvalid, Unauthenticated
from slotcar_client.rpc import OPTIONS, Stubs, call_metadata, translated
from slotcar_client.upload import Upload

T = TypeVar("T")
Perform = Callable[[Effect], Awaitable[Any]]


class AsyncRpc:
    """The stubs of one channel; `timeout_seconds` is the deadline of each call that is not a stream."""

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        """Raises RequestInvalid when a file of credentials cannot be read."""
        self.timeout_seconds = timeout_seconds
        self._address = address
        # With new certificates there is a new channel; what runs over an older one goes on.
        self._channels: list[aio.Channel] = []
        self._stubs = self._connected()

    def _connected(self) -> Stubs:
        channel = self._address.channel(
            lambda target: aio.insecure_channel(target, options=OPTIONS),
            lambda target, credentials: aio.secure_channel(target, credentials, options=OPTIONS),
        )
        self._channels.append(channel)
        return Stubs(channel)

    def _method(self, request: type[Message]) -> Any:
        if self._address.has_new_files():
            # A file that is missing for a moment is looked at again; the channel of before is as good till then.
            with contextlib.suppress(RequestInvalid):
                self._stubs = self._connected()
        return self._stubs.of(request)

    async def call(self, call: Call) -> Any:
        """The response, within the call's deadline. Raises SlotcarError."""
        return await self.identified(lambda: self._call(call))

    async def _call(self, call: Call) -> Any:
        with async_translated():
            return await self.begin(call)

    async def identified(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of an attempt; of another, with a token, if the sidecar does not know who called."""
        refused = self._address.given_token
        try:
            return await attempt()
        except Unauthenticated:
            if not await asyncio.to_thread(self._address.identify, refused):
                raise
        return await attempt()

    def begin(self, call: Call) -> Any:
        """The same as an awaitable that can be cancelled; it fails with gRPC's errors."""
        seconds = (call.timeout_seconds or self.timeout_seconds) + call.wait_seconds
        with translated():
            method = self._method(type(call.request))
            return method(call.request, timeout=seconds, metadata=call_metadata(self._address))

    def stream(self, request: Message) -> Any:
        """The answers to a request whose method streams them; a call without a deadline."""
        with translated():
            return self._method(type(request))(request, metadata=self._address.metadata())

    async def upload(self, upload: Upload) -> adapter_service_pb2.LoadAdapterStreamResponse:
        """Sends an adapter's files. Raises SlotcarError, also for what was wrong with the files on the way."""
        return await self.identified(lambda: self._upload(upload))

    async def _upload(self, upload: Upload) -> adapter_service_pb2.LoadAdapterStreamResponse:
        method = self._method(adapter_service_pb2.LoadAdapterStreamRequest)
        with upload.checked(), async_translated():
            response: adapter_service_pb2.LoadAdapterStreamResponse = await method(
                _in_threads(upload.requests()),
                timeout=self.timeout_seconds + upload.least_seconds,
                metadata=call_metadata(self._address),
            )
        return response

    async def perform(self, effect: Effect) -> Any:
        """The answer to an effect of a plan that only calls."""
        assert isinstance(effect, Call)
        return await self.call(effect)

    async def close(self) -> None:
        """Cancels what is under way. Idempotent."""
        for channel in self._channels:
            await channel.close()
        self._address.close()


async def run(plan: Plan[T], perform: Perform) -> T:
    """The result of a plan whose effects nobody else has to wait for."""
    advance: Advance = partial(next, plan)
    try:
        while True:
            advance = await performed(plan, perform, advance())
    except StopIteration as end:
        result: T = end.value
        return result


async def performed(plan: Plan[T], perform: Perform, effect: Effect) -> Advance:
    """Performs the effect; returns how the plan goes on."""
    try:
        return partial(plan.send, await perform(effect))
    except BaseException as error:  # the plan decides, also about a cancelled task
        return partial(plan.throw, error)


@contextlib.contextmanager
def async_translated() -> Iterator[None]:
    """Failures of gRPC become SlotcarErrors, also that of a call which was cancelled while its task was not."""
    with translated():
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise CallCancelled("the call was cancelled from this side") from error


async def _in_threads(chunks: Iterator[T]) -> AsyncIterator[T]:
    """The chunks, each read by a thread, so that a slow disk does not hold up the loop."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
