"""A session of the client from its opening to its end: ranks, versions, waits, holds, threads and what it closes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar.v1 import adapter_pb2, engine_service_pb2, layout_pb2
from slotcar_client import Client, Session
from slotcar_client.config import client_version
from slotcar_client.effects import Effect, Wait
from slotcar_client.stream_state import StreamState
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, FakeEngine, FakeServer
from tests.waiting import eventually

X = torch.arange(12.0).reshape(3, 4)
STALE = server_errors.LayoutStale("stale", entries=("sql",))


def test_a_broken_stream_of_the_session_is_resumed_with_its_mappings(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    before = session.session_id
    engine.streams[-1].set()
    eventually(lambda: session.recoveries.get("STREAM_ENDED"))
    assert session.session_id == before
    assert engine.named("OpenSession")[-1].resume_session == before
    session.forward({"q": X})
    assert len(engine.named("SetMapping")) == 1


def test_the_newest_layout_is_kept(session: Session, engine: FakeEngine) -> None:
    engine.generation = 41
    eventually(lambda: session.layout.version.generation == 41)


def test_a_late_layout_does_not_take_the_place_of_a_newer_one() -> None:
    state = StreamState()
    state.take(engine_service_pb2.OpenSessionResponse(opened=engine_service_pb2.SessionOpened(session="s")))
    for generation, newest in ((41, 41), (40, 41), (42, 42)):
        layout = layout_pb2.Layout(version=layout_pb2.LayoutVersion(epoch="e", generation=generation))
        state.take(engine_service_pb2.OpenSessionResponse(layout=layout))
        assert state.layout.version.generation == newest


def test_close_ends_everything(client: Client, engine: FakeEngine) -> None:
    others = frozenset(threading.enumerate())  # of tests before
    session = client.session()
    session.set_mapping([("sql", 3)])
    session.forward({"q": X})
    session.close()
    session.close()
    assert len(engine.named("CloseSession")) == 1
    assert not [t for t in threading.enumerate() if t.name == "slotcar-session" and t not in others]
    for call in (lambda: session.forward({"q": X}), lambda: session.set_mapping(["sql"])):
        with pytest.raises(slotcar_client.SlotcarError):
            call()
    assert engine.sessions == {}


def test_a_closed_client_closes_its_sessions(client: Client, engine: FakeEngine) -> None:
    client.session()
    kept = client.session()
    client.close()
    assert len(engine.named("CloseSession")) == 2
    for call in (kept.close, client.close):
        call()
    with pytest.raises(slotcar_client.Unavailable):
        client.list()


def test_without_a_server_calls_fail_at_once(tmp_path: Path) -> None:
    with slotcar_client.connect(f"unix://{tmp_path}/none.sock") as client:
        start = time.monotonic()
        for call in (client.session, client.list, client.events):
            with pytest.raises(slotcar_client.Unavailable):
                call()
        assert time.monotonic() - start < 20


def test_threads_share_a_session(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    wrong: list[object] = []

    def work(value: int) -> None:
        for step in range(20):
            x = X + value * 100 + step
            try:
                if not torch.equal(session.forward({"q": x})["q"], x):
                    wrong.append(value)
            except slotcar_client.SlotcarError as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_unknown_transport_is_refused(client: Client) -> None:
    with pytest.raises(slotcar_client.RequestInvalid):
        client.session(transport="ring")


def test_a_queued_set_mapping_outlives_the_deadline_of_other_calls(tmp_path: Path, engine: FakeEngine) -> None:
    with FakeServer(tmp_path, engine) as server, slotcar_client.connect(server.target, timeout_seconds=0.5) as client:
        session = client.session()
        engine.slots.clear()
        threading.Timer(1.0, engine.slots.set).start()
        assert session.set_mapping([("sql", 3)], wait_seconds=20.0).digests == {"sql": A}


def test_other_calls_go_on_while_one_is_queued_and_close_ends_it(session: Session, engine: FakeEngine) -> None:
    old = session.set_mapping([("sql", 3)])
    engine.slots.clear()
    ends: list[object] = []

    def queue() -> None:
        try:
            ends.append(session.set_mapping([("chat", 3)], wait_seconds=3600.0))
        except slotcar_client.SlotcarError as error:
            ends.append(error)

    thread = threading.Thread(target=queue)
    thread.start()
    assert engine.queued.wait(20)
    session.forward({"q": X}, mapping=old)
    assert ends == []
    session.close()
    thread.join(20)
    engine.slots.set()
    assert [type(end) for end in ends] == [slotcar_client.SessionClosed]


@pytest.mark.parametrize("call", ["set_mapping", "forward", "hold", "fence"])
def test_close_ends_a_call_that_waits_for_the_server(tmp_path: Path, engine: FakeEngine, call: str) -> None:
    with FakeServer(tmp_path, engine) as server, slotcar_client.connect(server.target, timeout_seconds=20) as client:
        session = client.session(away="wait", away_seconds=3600.0)
        session.set_mapping([("sql", 3)])
        server.stop()
        waits, ends = threading.Event(), list[object]()
        perform = session._perform

        def seen(effect: Effect) -> Any:
            if isinstance(effect, Wait) and threading.current_thread() is thread:
                waits.set()
            return perform(effect)

        def wait() -> None:
            calls = {
                "set_mapping": lambda: session.set_mapping([("sql", 3)]),
                "forward": lambda: session.forward({"q": X}),
                "hold": lambda: session.hold("sql"),
                "fence": session.fence,
            }
            try:
                ends.append(calls[call]())
            except slotcar_client.SlotcarError as error:
                ends.append(error)

        session._perform = seen  # type: ignore[method-assign]
        thread = threading.Thread(target=wait)
        thread.start()
        assert waits.wait(20)
        session.close()
        thread.join(20)
        assert [type(end) for end in ends] == [slotcar_client.SessionClosed]


def test_a_call_that_waits_goes_on_when_the_server_is_back(tmp_path: Path, engine: FakeEngine) -> None:
    with FakeServer(tmp_path, engine) as server, slotcar_client.connect(server.target, timeout_seconds=20) as client:
        session = client.session(away="wait", away_seconds=3600.0)
        session.set_mapping([("sql", 3)])
        hold = session.hold("sql", hold_id=5)
        server.stop()
        engine.sessions.clear()
        engine.epoch = "e2"
        perform = session._perform

        def back_on_wait(effect: Effect) -> Any:
            if isinstance(effect, Wait):
                session._perform = perform  # type: ignore[method-assign]
                server.start()
            return perform(effect)

        session._perform = back_on_wait  # type: ignore[method-assign]
        assert torch.equal(session.forward({"q": X})["q"], X)
        assert [entry.ref for entry in engine.named("SetMapping")[-1].targets] == [f"sql@{A}"]
        assert engine.holds[session.session_id] == {5: A}
        assert session.recoveries["SESSION_NOT_FOUND"] == session.recoveries["HOLD"] == 1
        session.release_hold(hold)
        assert engine.holds[session.session_id] == {}


def test_holds_are_released_at_the_end_of_their_block(session: Session, engine: FakeEngine) -> None:
    with session.hold("sql", seconds=9.5, slot=True) as hold:
        assert (hold.ref, hold.digest, hold.tier) == (f"sql@{A}", A, "device")
        assert engine.holds[session.session_id] == {hold.hold_id: A}
        request = engine.named("HoldAdapter")[0]
        assert (request.duration.ToMilliseconds(), request.tier) == (9500, adapter_pb2.TIER_DEVICE)
    session.release_hold(hold)
    assert engine.holds[session.session_id] == {}
    assert len(engine.named("ReleaseHold")) == 1


def test_a_hold_ends_without_an_error_when_its_session_or_server_is_gone(tmp_path: Path, engine: FakeEngine) -> None:
    with FakeServer(tmp_path, engine) as server, slotcar_client.connect(server.target, timeout_seconds=20) as client:
        session = client.session()
        with session.hold("sql"):
            engine.sessions.clear()
        with session.hold("sql"), session.hold("chat") as kept:
            server.stop()
        session.close()
        session.release_hold(kept)


def test_a_session_has_what_it_was_opened_with(client: Client, engine: FakeEngine) -> None:
    with client.session("tp", ranks=2, reserved_slots=3) as session:
        request = engine.named("OpenSession")[-1]
        assert (request.ranks, request.reserved_slots) == (2, 3)
        assert request.client_version == client_version()
        assert (session.ranks, session.reserved_slots) == (2, 3)
        assert session.server.max_response_bytes == 9
        session.fence()
        assert engine.named("Fence")[0].session == session.session_id


def test_a_rank_computes_for_a_session_that_is_not_its_own(client: Client, engine: FakeEngine) -> None:
    with client.session(ranks=2) as session:
        session.set_mapping([(f"sql@{A}", 3)])
        rank = client.join(session.session_id, 1)
        request = engine.named("JoinSession")[0]
        assert (request.session, request.rank, request.client_version) == (session.session_id, 1, client_version())
        assert (rank.rank, rank.ranks, rank.session_id) == (1, 2, session.session_id)
        assert rank.layout.version.epoch == "e1"
        rank.set_mapping([(f"sql@{A}", 3)])
        rank.forward({"q": X})
        session.set_mapping([(f"sql@{A}", 3)])
        session.forward({"q": X})
        assert [request.rank for request in engine.named("Forward")] == [1, 0]
        rank.close()
        assert engine.named("CloseSession") == []
        with pytest.raises(slotcar_client.SessionClosed):
            rank.forward({"q": X})


def test_a_rank_maps_again_but_never_opens(client: Client, engine: FakeEngine) -> None:
    with client.session(ranks=2) as session, client.join(session.session_id, 1) as rank:
        rank.set_mapping([(f"sql@{A}", 3)])
        engine.script = [STALE]
        rank.forward({"q": X})
        assert rank.recoveries == {"LAYOUT_STALE": 1}
        engine.sessions.clear()
        with pytest.raises(slotcar_client.SessionNotFound):
            rank.forward({"q": X})
        assert len(engine.named("OpenSession")) == 1
    with pytest.raises(slotcar_client.SessionNotFound):
        client.join("no-such-session", 1)


def test_a_rank_whose_place_was_taken_does_not_take_it_back(client: Client, engine: FakeEngine) -> None:
    with client.session(ranks=2) as session, client.join(session.session_id, 1) as rank:
        engine.streams[-1].set()
        stream = rank._stream
        assert stream is not None
        stream.join(20)
        assert stream.ended
        assert len(engine.named("JoinSession")) == 1


@pytest.mark.parametrize("version", ["", "0.1.0", "0.0.7", "0.2.0"])
def test_neighbouring_versions_work_together(client: Client, engine: FakeEngine, version: str) -> None:
    engine.version = version
    with client.session() as session:
        assert session.server.version == version


@pytest.mark.parametrize("version", ["0.9.0", "1.0.0", "garbage", "0"])
def test_other_versions_are_refused_and_their_session_is_closed(
    client: Client, engine: FakeEngine, version: str
) -> None:
    engine.version = version
    with pytest.raises(slotcar_client.VersionMismatch) as caught:
        client.session()
    assert caught.value.metadata == {"found": version, "wanted": client_version()}
    assert engine.sessions == {}
    assert len(engine.named("CloseSession")) == 1
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "slotcar-session"])


def test_the_versions_that_are_tested_are_neighbours_of_this_one() -> None:
    assert client_version().startswith("0.1.")


def test_an_unknown_setting_is_refused(client: Client) -> None:
    with pytest.raises(TypeError, match="gracefully"):
        client.session(gracefully=True)  # type: ignore[call-arg]
    with pytest.raises(slotcar_client.RequestInvalid):
        client.session(away="base")  # type: ignore[arg-type]


def test_a_child_process_is_told_to_connect_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process id stands for the fork itself, after which gRPC's threads are missing at random."""
    session.set_mapping([("sql", 3)])
    own = os.getpid()
    monkeypatch.setattr("slotcar_client.rpc.os.getpid", lambda: own + 1)
    for call in (lambda: session.forward({"q": X}), lambda: session.set_mapping([("sql", 1)])):
        with pytest.raises(slotcar_client.Unavailable, match="fork"):
            call()
    monkeypatch.undo()
    session.set_mapping([("sql", 1)])
