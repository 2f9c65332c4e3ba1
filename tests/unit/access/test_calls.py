"""Each call is made by a client of the policy, for what it may do, and changes nothing otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slotcar.v1 import adapter_service_pb2 as adapters
from slotcar.v1 import engine_service_pb2 as engines
from slotcar_sidecar.core.access import GROUPS
from slotcar_sidecar.rpc.server import MAX_METADATA_BYTES

from tests.unit.access.guarded import RPCS, Guarded, empty, entry, guarded, refusal

ENTRIES = [
    *(entry(group, verbs=f"[{group}]") for group in GROUPS),
    entry("all"),
    entry("ann", adapters='["a/*"]'),
    entry("bob", adapters='["b/*", c]'),
    entry("ring-only", planes="[ring]"),
    entry("small", max_sessions="1", max_reserved_slots="1"),
]


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path, *ENTRIES) as server:
        await server.world.load("a/x", "b/y", "c")
        yield server


@pytest.mark.parametrize("client", [None, "nobody"])
@pytest.mark.parametrize("name", sorted(RPCS))
async def test_every_call_of_nobody_is_refused(server: Guarded, name: str, client: str | None) -> None:
    """To see it fail: let an RPC pass by the interceptor."""
    info = await server.refused(name, empty(name), client)
    assert info is not None
    assert info.reason == "UNAUTHENTICATED"
    assert info.metadata["found"] == ("no credentials" if client is None else "the call's token")
    assert bool(server.told) == (client is not None), "who shows nothing at a unix socket is about to ask for a token"


@pytest.mark.parametrize("group", sorted(GROUPS))
async def test_a_group_of_verbs_gives_its_calls_and_no_other(server: Guarded, group: str) -> None:
    for name in RPCS:
        info = await server.refused(name, empty(name), group)
        if name in GROUPS[group] and name not in ("Forward", "ForwardStream"):
            assert info is None, name
        elif name not in GROUPS[group]:
            assert info is not None, name
            assert (info.reason, info.metadata["verb"], info.metadata["client"]) == ("NOT_ALLOWED", name, group)


async def test_health_says_nothing_of_anybody_and_is_open(server: Guarded) -> None:
    health = health_pb2_grpc.HealthStub(server.channel)
    status = await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
    assert status.status


NAMING: dict[str, Message] = {
    "LoadAdapter": adapters.LoadAdapterRequest(ref="b/y", source="x"),
    "LoadAdapterStream": adapters.LoadAdapterStreamRequest(header=adapters.UploadHeader(ref="b/y")),
    "UnloadAdapter": adapters.UnloadAdapterRequest(ref="b/y", force=True),
    "KeepAdapter": adapters.KeepAdapterRequest(ref="b/y"),
    "ReleaseKeep": adapters.ReleaseKeepRequest(ref="b/y"),
    "GetAdapter": adapters.GetAdapterRequest(ref="b/y"),
    "PrefetchAdapters": adapters.PrefetchAdaptersRequest(refs=["a/x", "b/y"]),
    "HoldAdapter": engines.HoldAdapterRequest(ref="b/y"),
    "SetMapping": engines.SetMappingRequest(targets=[engines.MappingEntry(ref="a/x"), engines.MappingEntry(ref="b/y")]),
}


def test_the_table_has_every_call_that_names_an_adapter() -> None:
    def names(message: object) -> bool:
        fields = message.fields  # type: ignore[attr-defined]
        return any(f.name in ("ref", "refs") or (f.message_type and names(f.message_type)) for f in fields)

    assert NAMING.keys() == {name for name, method in RPCS.items() if names(method.input_type)}


@pytest.mark.parametrize("name", sorted(NAMING))
async def test_an_adapter_of_others_cannot_be_named(server: Guarded, name: str) -> None:
    digest = server.world.cache.layout
    with pytest.raises(aio.AioRpcError) as refused:
        await server.call(name, NAMING[name], "ann")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    info = await server.refused(name, NAMING[name], "ann")
    assert info is not None
    assert info.metadata["adapter"] == "b/y"
    assert server.world.cache.layout == digest
    assert server.told[-1]["adapter"] == "b/y"


async def test_a_digest_is_no_way_around_the_name(server: Guarded) -> None:
    """Layouts show the digests of all slots. To see it fail: look at the ref's name alone."""
    theirs = (await server.call("GetAdapter", adapters.GetAdapterRequest(ref="b/y"), "bob")).adapter.digest
    mine = (await server.call("GetAdapter", adapters.GetAdapterRequest(ref="a/x"), "ann")).adapter.digest
    with pytest.raises(aio.AioRpcError) as refused:
        await server.call("LoadAdapter", adapters.LoadAdapterRequest(ref=f"a/stolen@{theirs}"), "ann")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    copied = await server.call("LoadAdapter", adapters.LoadAdapterRequest(ref=f"a/copy@{mine}"), "ann")
    assert copied.adapter.digest == mine
    opened = (await server.call("OpenSession", engines.OpenSessionRequest(grace={"seconds": 9}), "ann")).opened
    entries = [engines.MappingEntry(ref=f"a/x@{theirs}")]
    request = engines.SetMappingRequest(session=opened.session, entries=entries, load=True)
    with pytest.raises(aio.AioRpcError) as refused:
        await server.call("SetMapping", request, "ann")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_source_is_no_way_around_the_name(server: Guarded) -> None:
    """Bytes that are near would be had by a digest and any word for a source. To see it fail: read what is near."""
    theirs = (await server.call("GetAdapter", adapters.GetAdapterRequest(ref="b/y"), "bob")).adapter.digest
    stolen = adapters.LoadAdapterRequest(ref=f"a/stolen@{theirs}", source="a/x")
    with pytest.raises(aio.AioRpcError) as refused:
        await server.call("LoadAdapter", stolen, "ann")
    assert refusal(refused.value).reason == "DIGEST_MISMATCH"
    assert "a/stolen" not in map(str, server.world.cache.residency.names)
    stolen.source = "b/y"
    read = await server.call("LoadAdapter", stolen, "ann")
    assert read.adapter.digest == theirs, "who can read the bytes has them"


async def test_who_may_not_name_an_adapter_does_not_see_it(server: Guarded) -> None:
    listed = await server.call("ListAdapters", adapters.ListAdaptersRequest(), "bob")
    assert [adapter.name for adapter in listed.adapters] == ["b/y", "c"]
    assert len((await server.call("ListAdapters", adapters.ListAdaptersRequest(), "all")).adapters) == 3
    stream = server.begin("WatchEvents", adapters.WatchEventsRequest(replay=1000), "bob")
    greeting = await stream.read()
    seen = [await stream.read() for _ in range(greeting.replayed)]
    assert {message.event.name for message in seen} == {"b/y", "c"}
    assert sum(message.missed for message in seen) == 0
    stream.cancel()


SESSION_CALLS: dict[str, Callable[[str], Message]] = {
    "OpenSession": lambda session: engines.OpenSessionRequest(resume_session=session),
    "JoinSession": lambda session: engines.JoinSessionRequest(session=session),
    "CloseSession": lambda session: engines.CloseSessionRequest(session=session),
    "HoldAdapter": lambda session: engines.HoldAdapterRequest(session=session, ref="a/x"),
    "ReleaseHold": lambda session: engines.ReleaseHoldRequest(session=session),
    "SetMapping": lambda session: engines.SetMappingRequest(session=session),
    "ReleaseMapping": lambda session: engines.ReleaseMappingRequest(session=session),
    "Fence": lambda session: engines.FenceRequest(session=session),
    "Forward": lambda session: engines.ForwardRequest(session=session),
    "LoadAdapter": lambda session: adapters.LoadAdapterRequest(
        ref="a/x", source="a/x", hold=adapters.LoadHold(session=session)
    ),
}


def test_the_table_has_every_call_of_a_session() -> None:
    assert SESSION_CALLS.keys() | {"ForwardStream"} == GROUPS["engine"] | {"LoadAdapter"}


@pytest.mark.parametrize("name", sorted(SESSION_CALLS))
async def test_a_session_is_of_no_use_to_another_client(server: Guarded, name: str) -> None:
    """An id that leaked is worth nothing. To see it fail: look at the session's id alone."""
    opened = (await server.call("OpenSession", engines.OpenSessionRequest(grace={"seconds": 9}), "ann")).opened
    request = SESSION_CALLS[name](opened.session)
    info = await server.refused(name, request, "all")
    assert info is not None
    assert (info.reason, info.metadata["session"]) == ("NOT_ALLOWED", opened.session[:8])
    assert await server.refused(name, request, "ann") is None


async def test_one_forward_of_a_stream_is_refused_and_the_stream_goes_on(server: Guarded) -> None:
    opened = (await server.call("OpenSession", engines.OpenSessionRequest(grace={"seconds": 9}), "ann")).opened
    request = engines.ForwardStreamRequest(forward=engines.ForwardRequest(session=opened.session))
    stream = server.method("ForwardStream")(metadata=(("authorization", "Bearer the-token-of-all"),))
    for _ in range(2):
        await stream.write(request)
        answer = await stream.read()
        assert answer.error.metadata["session"] == opened.session[:8]
    stream.cancel()


async def test_a_plane_that_is_not_given_is_refused(server: Guarded) -> None:
    opened = (await server.call("OpenSession", engines.OpenSessionRequest(), "ring-only")).opened
    assert list(opened.server.planes) == [2]
    for name in ("Forward", "ForwardStream"):
        info = await server.refused(name, empty(name), "ring-only")
        assert info is not None
        assert info.metadata["plane"] == "stream"


async def test_a_clients_sessions_and_reservations_have_a_limit(server: Guarded) -> None:
    with pytest.raises(aio.AioRpcError, match="2 reserved slots"):
        await server.call("OpenSession", engines.OpenSessionRequest(reserved_slots=2), "small")
    stream = server.begin("OpenSession", engines.OpenSessionRequest(reserved_slots=1), "small")
    await stream.read()
    with pytest.raises(aio.AioRpcError, match="2 sessions") as refused:
        await server.call("OpenSession", engines.OpenSessionRequest(), "small")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    stream.cancel()


async def test_events_have_so_many_watchers_and_no_more(tmp_path: Path) -> None:
    async with guarded(tmp_path, entry("ann"), max_watchers=1) as server:
        watcher = server.begin("WatchEvents", adapters.WatchEventsRequest(), "ann")
        await watcher.read()
        with pytest.raises(aio.AioRpcError, match="1 streams of events") as refused:
            await server.call("WatchEvents", adapters.WatchEventsRequest(), "ann")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watcher.cancel()


async def test_metadata_has_a_size_and_no_more(server: Guarded) -> None:
    """gRPC itself refuses it, before anything of ours sees the call."""
    large = (("authorization", "Bearer " + "x" * MAX_METADATA_BYTES),)
    with pytest.raises(aio.AioRpcError) as refused:
        await server.method("GetCapacity")(adapters.GetCapacityRequest(), metadata=large, timeout=20)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_call_too_many_on_one_connection_waits(tmp_path: Path) -> None:
    async with guarded(tmp_path, entry("ann"), max_streams=1) as server:
        watcher = server.begin("WatchEvents", adapters.WatchEventsRequest(), "ann")
        await watcher.read()
        waiting = asyncio.ensure_future(server.call("GetCapacity", adapters.GetCapacityRequest(), "ann"))
        await server.world.settle_owner()
        assert not waiting.done()
        watcher.cancel()
        assert (await waiting).slots
