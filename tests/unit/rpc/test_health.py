"""What the process is, as its health services tell it, and watchers over a real server: none knows of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slotcar_sidecar.rpc.health import LIVENESS, READINESS, WHOLE, Health, HealthService, Phase

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = health_pb2.HealthCheckRequest(service=READINESS)
PATIENCE_SECONDS = 20
START, END, LOSE = Health.start, Health.end, Health.lose
STEPS = [steps for count in range(4) for steps in permutations((START, END, LOSE), count)]


@pytest.mark.parametrize("steps", STEPS, ids=lambda steps: "-".join(step.__name__ for step in steps) or "nothing")
async def test_each_service_says_what_follows_from_the_facts(steps: Sequence[Callable[[Health], None]]) -> None:
    """In any order: what is lost stays lost, also while it ends. To see it fail: let `end` say that all is well."""
    health = Health()
    for step in (*steps, *steps):
        step(health)
    is_ready = steps == (START,)
    assert health.status(LIVENESS) == (NOT_SERVING if LOSE in steps else SERVING)
    assert health.status(READINESS) == health.status(WHOLE) == (SERVING if is_ready else NOT_SERVING)
    assert health.status("other") == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    assert (health.phase is Phase.SERVING) == is_ready


@pytest.fixture
async def health() -> Health:
    health = Health()
    health.start()
    return health


@pytest.fixture
def closing() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def channel(health: Health, closing: asyncio.Event, tmp_path: Path) -> AsyncIterator[aio.Channel]:
    server = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(health, closing), server)
    server.add_insecure_port(f"unix:{tmp_path}/h")
    await server.start()
    async with aio.insecure_channel(f"unix:{tmp_path}/h") as channel:
        yield channel
    await server.stop(None)


async def read(watch: Any) -> int:
    message = await asyncio.wait_for(watch.read(), PATIENCE_SECONDS)
    assert message is not aio.EOF
    return int(message.status)


async def test_a_watcher_that_leaves_takes_nothing_from_the_others(health: Health, channel: aio.Channel) -> None:
    """With the library's Watch the second one hears nothing more."""
    stub = health_pb2_grpc.HealthStub(channel)
    leaves, stays = stub.Watch(REQUEST), stub.Watch(REQUEST)
    assert [await read(leaves), await read(stays)] == [SERVING, SERVING]
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves.read()
    health.end()
    assert await read(stays) == NOT_SERVING
    assert (await stub.Check(REQUEST)).status == NOT_SERVING
    assert (await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS))).status == SERVING


async def test_a_watch_ends_well_when_the_server_closes(closing: asyncio.Event, channel: aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(REQUEST)
    assert await read(watch) == SERVING
    closing.set()
    assert await asyncio.wait_for(watch.read(), PATIENCE_SECONDS) is aio.EOF


async def test_an_unknown_service_is_not_found(channel: aio.Channel) -> None:
    stub, unknown = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="other")
    watch = stub.Watch(unknown)
    assert await read(watch) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Check(unknown)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
