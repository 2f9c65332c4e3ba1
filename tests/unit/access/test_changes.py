"""A policy that changes: who loses a right loses what it has by it in the same step, and nobody else notices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from slotcar.v1 import adapter_service_pb2 as adapters
from slotcar.v1 import engine_service_pb2 as engines

from tests.unit.access.guarded import Guarded, entry, guarded, policy, refusal

OPEN = engines.OpenSessionRequest(grace={"seconds": 60})


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path, entry("ann"), entry("bob")) as server:
        yield server


async def ended(call: Any) -> aio.AioRpcError:
    """How a stream ends; what it still says before is passed over."""
    try:
        while await call.read() is not aio.EOF:
            pass
    except aio.AioRpcError as error:
        return error
    raise AssertionError("it ended as if all were well")


@pytest.mark.parametrize(
    "now",
    [
        pytest.param((), id="removed"),
        pytest.param((entry("ann", verbs="[read, engine]"),), id="fewer verbs"),
        pytest.param((entry("ann", adapters='["a/*"]'),), id="fewer adapters"),
        pytest.param((entry("ann", token_sha256="00" * 32),), id="another token"),
    ],
)
async def test_who_loses_a_right_loses_sessions_and_streams(server: Guarded, now: tuple[str, ...]) -> None:
    """To see it fail: look at the policy only when a call begins."""
    hers = [server.begin("OpenSession", OPEN, "ann"), server.begin("WatchEvents", adapters.WatchEventsRequest(), "ann")]
    his = [server.begin("OpenSession", OPEN, "bob"), server.begin("WatchEvents", adapters.WatchEventsRequest(), "bob")]
    opened = [(await call.read()) for call in (*hers, *his)]
    assert len(server.world.cache.sessions) == 2
    server.access.replace(policy(*now, entry("bob")))
    for call in hers:
        error = await ended(call)
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert refusal(error).metadata["client"] == "ann"
    assert [session.terms.owner for session in server.world.cache.sessions] == ["bob"]
    fence = engines.FenceRequest(session=opened[2].opened.session)
    await server.call("Fence", fence, "bob")
    for call in his:
        assert not call.done()
        call.cancel()


async def test_a_stream_of_forwards_and_an_upload_end_too(server: Guarded) -> None:
    shown = (("authorization", "Bearer the-token-of-ann"),)
    stream = server.method("ForwardStream")(metadata=shown)
    await stream.write(engines.ForwardStreamRequest())
    assert (await stream.read()).HasField("error")
    upload = server.method("LoadAdapterStream")(metadata=shown)
    await upload.write(
        adapters.LoadAdapterStreamRequest(header=adapters.UploadHeader(ref="x", config_bytes=9, weights_bytes=9))
    )
    await server.call("GetCapacity", adapters.GetCapacityRequest(), "ann")
    server.access.replace(policy(entry("bob")))
    assert (await ended(stream)).code() is grpc.StatusCode.PERMISSION_DENIED
    assert await upload.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_more_rights_end_nothing(server: Guarded) -> None:
    server.access.replace(policy(entry("ann", verbs="[engine]", adapters='["a/*"]')))
    call = server.begin("OpenSession", OPEN, "ann")
    await call.read()
    server.access.replace(policy(entry("new"), entry("ann", verbs="[engine, read]", adapters='["a*"]')))
    await server.call("GetCapacity", adapters.GetCapacityRequest(), "ann")
    assert len(server.world.cache.sessions) == 1
    assert not call.done()
    call.cancel()
