"""A refused call is over when it is answered: nothing of it waits for the collector."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from slotcar.v1 import adapter_service_pb2 as adapters
from slotcar.v1 import adapter_service_pb2_grpc, engine_service_pb2_grpc
from slotcar.v1 import engine_service_pb2 as pb
from slotcar_sidecar.rpc.server import Serving, make_server

from tests.fakes.parts import make_bench

CALLS = 20


@pytest_asyncio.fixture
async def channel(tmp_path: Path) -> AsyncIterator[aio.Channel]:
    """To a server over an empty cache, in this process."""
    server = make_server(make_bench(1).cache, Serving(1 << 20, 1.0, lambda method, reason: None))
    address = f"unix:{tmp_path / 's.sock'}"
    server.add_insecure_port(address)
    await server.start()
    async with aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(1.0)


@pytest.fixture
def collector() -> Iterator[None]:
    """Runs when the test says so, and at no other time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("method", ["Fence", "LoadAdapter", "OpenSession"])
async def test_it_leaves_no_circle(channel: aio.Channel, collector: None, method: str) -> None:
    engine = engine_service_pb2_grpc.EngineServiceStub(channel)
    adapter = adapter_service_pb2_grpc.AdapterServiceStub(channel)

    async def call() -> grpc.StatusCode:
        match method:
            case "Fence":
                made: Any = engine.Fence(pb.FenceRequest(session="none"))
            case "LoadAdapter":
                made = adapter.LoadAdapter(adapters.LoadAdapterRequest())
            case _:
                made = engine.OpenSession(pb.OpenSessionRequest(client_version="banana"))
        return await made.code()  # type: ignore[no-any-return]

    for _ in range(CALLS):
        assert await call() is not None
    kinds = ("RPCState", "_ServicerContext", "AbortError", "SlotcarError")
    left = Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing).__name__ in kinds)
    assert all(count < CALLS / 2 for count in left.values()), left


async def test_a_session_whose_first_answer_fails_is_without_a_stream(tmp_path: Path) -> None:
    """It ends with its grace then; with a stream that is not there it would stay for good."""
    cache = make_bench(1).cache
    server = make_server(cache, Serving(1 << 20, 1.0, lambda method, reason: None, planes=("none",)))
    address = f"unix:{tmp_path / 's.sock'}"
    server.add_insecure_port(address)
    await server.start()
    async with aio.insecure_channel(address) as channel:
        stream = engine_service_pb2_grpc.EngineServiceStub(channel).OpenSession(pb.OpenSessionRequest())
        with pytest.raises(grpc.RpcError) as refused:
            await stream.read()
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        assert [session.attachment for session in cache.sessions] == [None]
    await server.stop(1.0)
