"""Before a pool of sidecars: its proxy is told with every call, and a new session takes no stream of an old one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import slotcar_client
import torch
from slotcar.v1 import engine_service_pb2_grpc
from slotcar_client import Client, RequestInvalid, aio
from slotcar_client.credentials import AFFINITY_KEY, Address, Credentials
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, FakeEngine, FakeServer
from tests.waiting import eventually

X = torch.arange(12.0).reshape(3, 4)
ENGINE_CALLS = {"OpenSession", "SetMapping", "ForwardStream", "ReleaseMapping", "CloseSession"}


class Noting(grpc.ServerInterceptor):
    """Keeps what each call carried, by its method."""

    def __init__(self) -> None:
        self.affinities: dict[str, list[str]] = {}

    def intercept_service(self, go_on: Callable[[Any], Any], call: Any) -> Any:
        found = [text for key, text in call.invocation_metadata if key == AFFINITY_KEY]
        self.affinities.setdefault(call.method.rpartition("/")[2], []).extend(found)
        return go_on(call)


@pytest.fixture
def noted(tmp_path: Path) -> Any:
    noting = Noting()
    server = grpc.server(ThreadPoolExecutor(8), interceptors=[noting])
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(FakeEngine(sql=A), server)
    server.add_insecure_port(f"unix://{tmp_path}/f.sock")
    server.start()
    yield f"unix://{tmp_path}/f.sock", noting.affinities
    server.stop(None).wait()


def test_every_call_carries_it(noted: Any) -> None:
    target, affinities = noted
    with (
        slotcar_client.connect(target, timeout_seconds=20, affinity="sql") as client,
        client.session(transport="stream") as session,
    ):
        session.set_mapping([("sql", 3)])
        session.forward({"q": X})
        session.release_mapping()
    assert affinities == {name: ["sql"] for name in ENGINE_CALLS}


async def test_every_call_carries_it_with_asyncio(noted: Any) -> None:
    target, affinities = noted
    async with aio.connect(target, timeout_seconds=20, affinity="sql") as client, client.session() as session:
        await session.set_mapping([("sql", 3)])
        await session.forward({"q": X})
    assert affinities.keys() >= {"OpenSession", "SetMapping", "Forward"}
    assert set(map(tuple, affinities.values())) == {("sql",)}


def test_without_it_nothing_is_said(noted: Any) -> None:
    target, affinities = noted
    with slotcar_client.connect(target, timeout_seconds=20) as client, client.session():
        pass
    assert set(map(tuple, affinities.values())) == {()}


def test_it_stands_beside_a_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-16-bytes")
    address = Address("127.0.0.1:1", Credentials(token_file=tmp_path / "token"), "sql")
    assert address.metadata() == (("authorization", "Bearer a-token-of-16-bytes"), (AFFINITY_KEY, "sql"))


@pytest.mark.parametrize("affinity", ["a\nb", "ü", "a" * 257, "\x00"])
def test_what_metadata_cannot_carry_is_refused_before_any_call(affinity: str) -> None:
    with pytest.raises(RequestInvalid, match="affinity"):
        slotcar_client.connect("127.0.0.1:1", affinity=affinity)


def test_a_session_that_is_opened_anew_leaves_the_stream_of_the_old_one(client: Client, engine: FakeEngine) -> None:
    """A proxy keeps a stream where it went at its start, and the new session may be elsewhere."""
    with client.session(transport="stream") as session:
        session.set_mapping([("sql", 3)])
        session.forward({"q": X})
        engine.script = [server_errors.SessionNotFound()]
        session.forward({"q": X})
        assert session.recoveries["SESSION_NOT_FOUND"] == 1
    assert len(engine.named("ForwardStream")) == 2


@pytest.mark.parametrize("away", ["wait", "fail"])
def test_a_stream_that_a_proxy_reset_is_one_whose_server_is_away(tmp_path: Path, away: Any) -> None:
    with (
        FakeServer(tmp_path, ResetOnce(sql=A)) as server,
        slotcar_client.connect(server.target, timeout_seconds=20) as client,
        client.session(transport="stream", away=away) as session,
    ):
        session.set_mapping([("sql", 3)])
        if away == "fail":
            with pytest.raises(slotcar_client.Unavailable, match="RST_STREAM"):
                session.forward({"q": X})
        assert session.forward({"q": X})["q"].equal(X)


class ResetOnce(FakeEngine):
    """Its first stream of Forwards ends as one does behind a proxy whose connection to the server ended."""

    def ForwardStream(self, requests: Any, context: Any) -> Any:
        if not self.named("ForwardStream"):
            self.calls.append(("ForwardStream", None))
            context.abort(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")
        yield from super().ForwardStream(requests, context)


def test_a_session_whose_first_stream_a_proxy_reset_is_opened_again(tmp_path: Path) -> None:
    with (
        FakeServer(tmp_path, ResetAtOpening(sql=A)) as server,
        slotcar_client.connect(server.target, timeout_seconds=20) as client,
        client.session(transport="stream", away="wait") as session,
    ):
        assert session.recoveries == {"UNAVAILABLE": 1}


async def test_so_it_is_with_asyncio(tmp_path: Path) -> None:
    with FakeServer(tmp_path, ResetAtOpening(sql=A)) as server:
        async with aio.connect(server.target, timeout_seconds=20) as client, client.session(away="wait") as session:
            assert session.recoveries == {"UNAVAILABLE": 1}


class ResetAtOpening(FakeEngine):
    """Its first stream of a session ends so before the session is open."""

    def OpenSession(self, request: Any, context: Any) -> Any:
        if not self.named("Reset"):
            self.calls.append(("Reset", None))
            context.abort(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")
        yield from super().OpenSession(request, context)


def test_a_release_waits_as_every_call_does(tmp_path: Path) -> None:
    with (
        FakeServer(tmp_path, AwayOnce(sql=A)) as server,
        slotcar_client.connect(server.target, timeout_seconds=20) as client,
        client.session(transport="unary", away="wait") as session,
    ):
        session.set_mapping([("sql", 3)])
        session.release_mapping()
        with pytest.raises(slotcar_client.MappingReplaced):
            session.forward({"q": X})


class AwayOnce(FakeEngine):
    """Is away when it is to release a mapping for the first time."""

    def ReleaseMapping(self, request: Any, context: Any) -> Any:
        if not self.named("Away"):
            self.calls.append(("Away", None))
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return super().ReleaseMapping(request, context)


def test_a_session_that_is_resumed_keeps_its_stream(client: Client, engine: FakeEngine) -> None:
    with client.session(transport="stream") as session:
        session.set_mapping([("sql", 3)])
        session.forward({"q": X})
        engine.streams[-1].set()
        eventually(lambda: session.recoveries.get("STREAM_ENDED"))
        session.forward({"q": X})
    assert len(engine.named("ForwardStream")) == 1
