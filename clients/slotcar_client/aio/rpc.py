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

from slotcar_client.effects import Advance, Call, Effect, Plan
from slotcar_client.errors import CallCancelled
from slotcar_client.rpc import OPTIONS, Stubs, translated
from slotcar_client.upload import Upload

T = TypeVar("T")
Perform = Callable[[Effect], Awaitable[Any]]


class AsyncRpc:
    """The stubs of one channel; `timeout_seconds` is the deadline of each call that is not a stream."""

    def __init__(self, target: str, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._channel = aio.insecure_channel(target, options=OPTIONS)
        self._stubs = Stubs(self._channel)

    async def call(self, call: Call) -> Any:
        """The response, within the call's deadline. Raises SlotcarError."""
        with async_translated():
            return await self.begin(call)

    def begin(self, call: Call) -> Any:
        """The same as an awaitable that can be cancelled; it fails with gRPC's errors."""
        seconds = (call.timeout_seconds or self.timeout_seconds) + call.wait_seconds
        with translated():
            return self._stubs.of(type(call.request))(call.request, timeout=seconds)

    def stream(self, request: Message) -> Any:
        """The answers to a request whose method streams them; a call without a deadline."""
        with translated():
            return self._stubs.of(type(request))(request)

    async def upload(self, upload: Upload) -> adapter_service_pb2.LoadAdapterStreamResponse:
        """Sends an adapter's files. Raises SlotcarError, also for what was wrong with the files on the way."""
        method = self._stubs.of(adapter_service_pb2.LoadAdapterStreamRequest)
        with upload.checked(), async_translated():
            response: adapter_service_pb2.LoadAdapterStreamResponse = await method(
                _in_threads(upload.requests()), timeout=self.timeout_seconds + upload.least_seconds
            )
        return response

    async def perform(self, effect: Effect) -> Any:
        """The answer to an effect of a plan that only calls."""
        assert isinstance(effect, Call)
        return await self.call(effect)

    async def close(self) -> None:
        """Cancels what is under way. Idempotent."""
        await self._channel.close()


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
