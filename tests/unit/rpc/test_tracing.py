"""What is known of an RPC while it runs and when it has ended, over a real server with handlers of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc import aio
from slotcar_sidecar.core.call import CALL, Call
from slotcar_sidecar.core.errors import AdapterNotFound
from slotcar_sidecar.core.ids import AdapterRef
from slotcar_sidecar.rpc.interceptors import ErrorInterceptor
from slotcar_sidecar.rpc.tracing import CallInterceptor

LOAD, FORWARD, HANG, WATCH = "LoadAdapter", "Forward", "Hang", "WatchEvents"
TRACE, SPAN = "ab" * 16, "cd" * 8


@dataclass
class Recorded:
    """A span's place that remembers what it was told; as rpc.tracing.CallSpan."""

    method: str
    headers: dict[str, str]
    trace: str = TRACE
    span_id: str = SPAN
    ends: list[tuple[str, str]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, code: str, reason: str) -> None:
        self.ends.append((code, reason))
        self.ended.set()


@dataclass
class Bench:
    """What handlers saw, and the spans that were begun."""

    calls: list[Call] = field(default_factory=list)
    spans: list[Recorded] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, method: str, headers: Any, _ref: str) -> Recorded:
        self.spans.append(Recorded(method, dict(headers)))
        return self.spans[-1]

    async def answer(self, request: bytes, context: Any) -> bytes:
        self.calls.append(CALL.get())
        if request == b"refuse":
            raise AdapterNotFound(AdapterRef.parse("nobody"))
        return b""

    async def hang(self, request: bytes, context: Any) -> bytes:
        self.entered.set()
        await asyncio.Event().wait()
        return b""

    async def watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.calls.append(CALL.get())
        yield b""

    @asynccontextmanager
    async def served(self, begin: Callable[..., Recorded] | None) -> AsyncIterator[aio.Channel]:
        errors = ErrorInterceptor(1 << 20, lambda method, reason: None)
        server = aio.server(interceptors=[CallInterceptor(begin), errors])
        unary = {LOAD: self.answer, FORWARD: self.answer, HANG: self.hang}
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(handler, bytes, bytes) for name, handler in unary.items()
        }
        handlers[WATCH] = grpc.unary_stream_rpc_method_handler(self.watch, bytes, bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("slotcar.v1.Test", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
        await server.stop(None)


async def _awaited(call: Any) -> bytes:
    answer: bytes = await call
    return answer


def path(name: str) -> str:
    return f"/slotcar.v1.Test/{name}"


async def test_what_runs_knows_its_call_and_the_span_its_end() -> None:
    bench = Bench()
    async with bench.served(bench.begin) as channel:
        await channel.unary_unary(path(LOAD))(b"", metadata=(("traceparent", "x"),))
        with pytest.raises(aio.AioRpcError):
            await channel.unary_unary(path(LOAD))(b"refuse")
    assert [(call.method, call.trace, call.span) for call in bench.calls] == [(LOAD, TRACE, SPAN)] * 2
    assert bench.calls[0].peer.startswith("ipv4:127.0.0.1:")
    assert bench.spans[0].headers["traceparent"] == "x"
    assert [span.method for span in bench.spans] == [f"slotcar.v1.Test/{LOAD}"] * 2
    assert [span.ends for span in bench.spans] == [[("OK", "")], [("NOT_FOUND", "ADAPTER_NOT_FOUND")]]
    assert CALL.get() == Call()


async def test_a_call_that_its_caller_left_has_an_end() -> None:
    bench = Bench()
    async with bench.served(bench.begin) as channel:
        call = asyncio.ensure_future(_awaited(channel.unary_unary(path(HANG))(b"")))
        await bench.entered.wait()
        call.cancel()
        await bench.spans[0].ended.wait()
    assert bench.spans[0].ends == [("CANCELLED", "")]


async def test_without_tracing_a_call_is_known_all_the_same_and_a_stream_has_no_span() -> None:
    bench = Bench()
    async with bench.served(None) as channel:
        await channel.unary_unary(path(LOAD))(b"")
    async with bench.served(bench.begin) as channel:
        assert [message async for message in channel.unary_stream(path(WATCH))(b"")] == [b""]
    assert [(call.method, call.trace) for call in bench.calls] == [(LOAD, ""), (WATCH, "")]
    assert bench.spans == []


async def test_a_forward_that_nobody_traces_passes_by_untouched() -> None:
    bench = Bench()
    async with bench.served(None) as channel:
        await channel.unary_unary(path(FORWARD))(b"")
    async with bench.served(bench.begin) as channel:
        await channel.unary_unary(path(FORWARD))(b"")
    assert [(call.method, call.trace) for call in bench.calls] == [("", ""), (FORWARD, TRACE)]
    assert len(bench.spans) == 1


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
async def test_at_debug_each_call_but_a_forward_has_a_line(caplog: pytest.LogCaptureFixture, level: int) -> None:
    caplog.set_level(level, "slotcar.rpc")
    bench = Bench()
    async with bench.served(None) as channel:
        for name, request in ((LOAD, b""), (FORWARD, b""), (LOAD, b"refuse")):
            with pytest.raises(aio.AioRpcError) if request else nullcontext():
                await channel.unary_unary(path(name))(request)
        _ = [message async for message in channel.unary_stream(path(WATCH))(b"")]
    fields: list[dict[str, Any]] = [record.__dict__["fields"] for record in caplog.records if record.message == "call"]
    found = [(each["method"], each["reason"]) for each in fields]
    wanted = [(LOAD, "OK"), (LOAD, "ADAPTER_NOT_FOUND"), (WATCH, "OK")]
    assert found == (wanted if level == logging.DEBUG else [])
