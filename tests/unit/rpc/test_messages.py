"""What gRPC reads and writes for a call is never cut short, and all else of the call ends when its caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from grpc import aio
from slotcar_sidecar.rpc.messages import Messages


class Context:
    """A call of which the test says when a read or a write ends; `cut` counts those that were cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.cut = 0

    async def read(self) -> Any:
        self.begun.set()
        try:
            return await asyncio.shield(self.done)
        except asyncio.CancelledError:
            self.cut += 1
            raise

    async def write(self, response: Any) -> None:
        await self.read()


async def reading(messages: Messages, seen: list[Any]) -> None:
    async for request in messages.each():
        seen += [request]


async def writing(messages: Messages, seen: list[Any]) -> None:
    await messages.write("a")
    seen.append("written")


def begin(body: Callable[[Messages, list[Any]], Any]) -> tuple[Context, asyncio.Task[Any], list[Any]]:
    context, seen = Context(), list[Any]()
    messages = Messages(cast(Any, context))
    return context, asyncio.create_task(messages.run(body(messages, seen))), seen


@pytest.mark.parametrize("body", [reading, writing])
async def test_what_grpc_does_is_let_end_when_the_caller_leaves(body: Callable[..., Any]) -> None:
    """Then nothing more is read or sent. To see it fail: cancel the task wherever it is."""
    context, call, seen = begin(body)
    await context.begun.wait()
    call.cancel()
    await asyncio.sleep(0)
    assert not call.done()
    context.done.set_result("late")
    with pytest.raises(asyncio.CancelledError):
        await call
    assert context.cut == 0
    assert not seen


async def test_what_the_call_waits_for_elsewhere_ends_at_once() -> None:
    waits, ended = asyncio.Event(), asyncio.Event()

    async def body(messages: Messages, seen: list[Any]) -> None:
        waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    _, call, _ = begin(body)
    await waits.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()


async def test_a_connection_that_ends_in_a_write_is_a_caller_who_left() -> None:
    context, call, seen = begin(writing)
    context.done.set_exception(aio.InternalError("Failed grpc_call_start_batch"))
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not seen


async def test_the_last_request_is_the_end() -> None:
    context, call, seen = begin(reading)
    context.done.set_result(aio.EOF)
    await call
    assert not seen
