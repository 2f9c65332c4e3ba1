"""Health watchers over a real server: what one does is nothing to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slotcar_sidecar.rpc.health import Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = health_pb2.HealthCheckRequest(service="readiness")
PATIENCE_SECONDS = 20


@pytest.fixture
async def servicer() -> Health:
    servicer = Health(asyncio.Event())
    await servicer.set("readiness", SERVING)
    return servicer


@pytest.fixture
async def channel(servicer: Health, tmp_path: Path) -> AsyncIterator[aio.Channel]:
    server = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{tmp_path}/h")
    await server.start()
    async with aio.insecure_channel(f"unix:{tmp_path}/h") as channel:
        yield channel
    await server.stop(None)


async def read(watch: Any) -> int:
    message = await asyncio.wait_for(watch.read(), PATIENCE_SECONDS)
    assert message is not aio.EOF
    return int(message.status)


async def test_a_watcher_that_leaves_takes_nothing_from_the_others(servicer: Health, channel: aio.Channel) -> None:
    """With the library's Watch the second one hears nothing more."""
    stub = health_pb2_grpc.HealthStub(channel)
    leaves, stays = stub.Watch(REQUEST), stub.Watch(REQUEST)
    assert [await read(leaves), await read(stays)] == [SERVING, SERVING]
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves.read()
    for status in (NOT_SERVING, SERVING):
        await asyncio.wait_for(servicer.set("readiness", status), PATIENCE_SECONDS)
        assert await read(stays) == status
    assert (await stub.Check(REQUEST)).status == SERVING


async def test_a_watch_ends_well_when_the_server_closes(servicer: Health, channel: aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(REQUEST)
    assert await read(watch) == SERVING
    servicer._closing.set()
    assert await asyncio.wait_for(watch.read(), PATIENCE_SECONDS) is aio.EOF


async def test_an_unknown_service_is_unknown_until_it_is_set(servicer: Health, channel: aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="later"))
    assert await read(watch) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    await servicer.set("later", SERVING)
    assert await read(watch) == SERVING
