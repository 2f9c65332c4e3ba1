"""Which transport a session gets, and what it says about it."""

from __future__ import annotations

import importlib.util
import logging
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import slotcar_client
import torch
from slotcar.v1 import engine_service_pb2_grpc, plane_pb2
from slotcar_client import Client, aio
from slotcar_kernels import native
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, FakeServer
from tests.unit.client.ring.fake_ring import FakeRing, RingEngine
from tests.waiting import eventually

X = torch.arange(12.0).reshape(3, 4)
ALL = [plane_pb2.PLANE_STREAM, plane_pb2.PLANE_RING, plane_pb2.PLANE_DIRECT]


def test_auto_is_the_fastest_that_both_sides_have(client: Client) -> None:
    with client.session() as session:
        assert session.transport == "ring"
        assert session.transport_reason == "direct: the server does not offer it"
        session.set_mapping([("sql", 3)])
        assert torch.equal(session.forward({"q": X})["q"], X)


def test_auto_takes_the_next_when_a_plane_cannot_be_opened(client: Client, engine: RingEngine, ring: FakeRing) -> None:
    engine.planes = ALL
    with client.session() as session:
        assert session.transport == "ring"
        assert session.transport_reason.startswith("direct: the number of descriptors is 3, wanted 4")
    ring.error = server_errors.CapacityExceeded("no room for regions", found=2, wanted=1)
    with client.session() as session:
        assert session.transport == "stream"
        assert session.transport_reason == "direct: no room for regions; ring: no room for regions"
        session.set_mapping([("sql", 3)])
        assert torch.equal(session.forward({"q": X})["q"], X)


def test_auto_without_a_hand_shake_is_the_stream(tmp_path: Path, engine: RingEngine) -> None:
    with FakeServer(tmp_path, engine) as server, slotcar_client.connect(server.target) as client:
        with client.session() as session:
            assert session.transport == "stream"
            assert "ring: no hand-shake at" in session.transport_reason
        with client.session(transport="unary") as session:
            assert (session.transport, session.transport_reason) == ("unary", "unary was asked for")


def test_auto_without_a_model_is_the_stream(client: Client, engine: RingEngine, ring: FakeRing) -> None:
    engine.model_spec = None
    with client.session() as session:
        assert session.transport == "stream"
        assert "ring: the server knew no model when the session was opened" in session.transport_reason
        assert ring.connections[0].over.wait(20)
    with pytest.raises(slotcar_client.ModelUnknown):
        client.session(transport="ring")
    assert engine.sessions == {}


def test_over_tcp_there_is_only_the_stream(engine: RingEngine) -> None:
    server = grpc.server(ThreadPoolExecutor(8))
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    with slotcar_client.connect(f"localhost:{port}") as client:
        with client.session() as session:
            assert session.transport == "stream"
            assert "ring: the server is not at a unix socket of this machine" in session.transport_reason
        with pytest.raises(slotcar_client.RequestInvalid, match="not at a unix socket"):
            client.session(transport="ring")
    server.stop(None).wait()


def test_a_transport_that_was_asked_for_is_had_or_refused(client: Client, engine: RingEngine) -> None:
    engine.planes = [plane_pb2.PLANE_STREAM]
    for name in ("ring", "direct"):
        with pytest.raises(slotcar_client.RequestInvalid, match="does not offer") as caught:
            client.session(transport=name)
        assert caught.value.metadata == {"field": "transport", "found": name, "wanted": "auto or stream"}
    assert engine.sessions == {}, "the session was closed"
    with pytest.raises(slotcar_client.RequestInvalid, match="transport is 'telepathy'"):
        client.session(transport="telepathy")
    assert len(engine.named("OpenSession")) == 2


def test_without_torch_there_is_only_the_stream(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    with client.session() as session:
        assert session.transport == "stream"
        assert session.transport_reason.endswith("ring: torch is not installed")


@pytest.mark.parametrize(("machine", "compiled", "why_not"), [("aarch64", False, "compiled kernels"), ("a", True, "")])
def test_direct_needs_ordered_memory(
    client: Client, engine: RingEngine, monkeypatch: pytest.MonkeyPatch, machine: str, compiled: bool, why_not: str
) -> None:
    engine.planes = ALL
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(native, "available", lambda: compiled)
    with client.session() as session:
        assert (why_not or "descriptors") in session.transport_reason


def test_what_is_used_is_logged_once_in_each_session(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "slotcar.client"), client.session() as session:
        session.set_mapping([("sql", 3)])
        session.forward({"q": X})
        (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"session {session.session_id} uses ring: direct: the server does not offer it"


def test_a_session_that_is_opened_anew_chooses_again(client: Client, engine: RingEngine, ring: FakeRing) -> None:
    ring.error = server_errors.CapacityExceeded("no room", found=2, wanted=1)
    with client.session() as session:
        session.set_mapping([("sql", 3)])
        assert session.transport == "stream"
        ring.error = None
        engine.sessions.clear()
        assert torch.equal(session.forward({"q": X})["q"], X)
        assert session.transport == "ring"
        engine.planes = [plane_pb2.PLANE_STREAM]
        engine.sessions.clear()
        assert torch.equal(session.forward({"q": X})["q"], X)
        assert session.transport == "stream"
        assert ring.connections[0].over.wait(20)
        assert session.forward_async({"q": X}).done()


def test_a_transport_that_a_new_server_does_not_offer_is_every_calls_error(client: Client, engine: RingEngine) -> None:
    with client.session(transport="ring") as session:
        session.set_mapping([("sql", 3)])
        planes, engine.planes = engine.planes, [plane_pb2.PLANE_STREAM]
        engine.sessions.clear()
        for _ in range(3):
            with pytest.raises(slotcar_client.RequestInvalid, match="does not offer"):
                session.forward({"q": X})
            assert engine.sessions == {}, "no session is left behind"
        engine.planes = planes
        assert torch.equal(session.forward({"q": X})["q"], X)


def test_a_session_that_is_resumed_keeps_its_connection(client: Client, engine: RingEngine, ring: FakeRing) -> None:
    engine.planes = ALL
    with client.session() as session:
        session.set_mapping([("sql", 3)])
        engine.streams[-1].set()
        while not session.recoveries:
            session.forward({"q": X})
        assert torch.equal(session.forward({"q": X})["q"], X)
        assert session.recoveries == {"STREAM_ENDED": 1}
        assert [hello.plane for hello in ring.hellos] == [plane_pb2.PLANE_DIRECT, plane_pb2.PLANE_RING]


def test_a_session_that_is_resumed_without_its_connection_chooses_again(
    client: Client, engine: RingEngine, ring: FakeRing
) -> None:
    with client.session() as session:
        session.set_mapping([("sql", 3)])
        ring.error = server_errors.CapacityExceeded("no room", found=2, wanted=1)
        ring.connections[0].end()
        engine.streams[-1].set()
        eventually(lambda: session.recoveries)
        assert torch.equal(session.forward({"q": X})["q"], X)
        assert session.transport == "stream"


def test_what_is_under_way_when_the_transport_changes_is_computed_again(
    client: Client, engine: RingEngine, ring: FakeRing
) -> None:
    with client.session() as session:
        session.set_mapping([("sql", 3)])
        ring.answer.clear()
        pending = session.forward_async({"q": X})
        engine.planes = [plane_pb2.PLANE_STREAM]
        engine.sessions.clear()
        ring.answer.set()
        ring.connections[0].end()
        session.hold(f"sql@{A}")
        assert session.transport == "stream"
        assert torch.equal(pending.result()["q"], X)


@pytest.mark.parametrize("settings", [{"transport": "ring"}, {"transport": "direct"}, {"transport": "telepathy"}])
async def test_asyncio_has_no_shared_memory(ring: FakeRing, settings: Any) -> None:
    async with aio.connect(ring.target) as client:
        with pytest.raises(slotcar_client.RequestInvalid):
            client.session(**settings)
        async with client.session() as session:
            await session.set_mapping([("sql", 3)])
            assert torch.equal((await session.forward({"q": X}))["q"], X)
    assert ring.hellos == []


@pytest.mark.parametrize("found", [0, 4095, (1 << 32) + 1, -1])
def test_an_arena_has_a_sound_size(client: Client, found: int) -> None:
    with pytest.raises(slotcar_client.RequestInvalid):
        client.session(arena_bytes=found)
