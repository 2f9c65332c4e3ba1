"""What a session does with each answer, shown by a server that gives it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar.v1 import adapter_pb2, engine_service_pb2, layout_pb2
from slotcar_client import BASE, Client, Mapping, Session
from slotcar_client.config import client_version
from slotcar_client.effects import Effect, Wait
from slotcar_client.recovery import MAX_STEPS
from slotcar_client.stream_state import StreamState
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, B, EndStreamError, FakeEngine, FakeServer, eventually

X = torch.arange(12.0).reshape(3, 4)
STALE = server_errors.LayoutStale("stale", entries=("sql",))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(sql=A, chat=B)


@pytest.fixture
def client(tmp_path: Path, engine: FakeEngine) -> Iterator[Client]:
    with FakeServer(tmp_path, engine) as server, slotcar_client.connect(server.target, timeout_seconds=20) as client:
        yield client


@pytest.fixture(params=["stream", "unary"])
def session(request: pytest.FixtureRequest, client: Client) -> Iterator[Session]:
    with client.session("test", transport=request.param) as session:
        yield session


def test_forward_answers_for_the_mapping(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 2), (BASE, 1)])
    out = session.forward({"q": X})
    assert torch.equal(out["q"], X)
    request = engine.named("Forward")[0]
    assert (list(request.row_counts), request.mapping_id, request.generation) == ([2, 1], 1, 1)
    assert session.forward({"q": X}, row_counts=[1, 2])
    assert list(engine.named("Forward")[1].row_counts) == [1, 2]


def test_one_x_travels_once(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    y = X + 1
    out = session.forward({"q": X, "o": y, "k": X})
    assert torch.equal(out["o"], y)
    assert torch.equal(out["k"], X)
    items = engine.named("Forward")[0].items
    assert [(item.site, item.HasField("x")) for item in items] == [("q", True), ("k", False), ("o", True)]


def test_outputs_are_the_callers_to_write(session: Session) -> None:
    session.set_mapping([("sql", 3)])
    out = session.forward({"q": X, "k": X})
    out["q"].fill_(7)
    assert torch.equal(out["k"], X)


def test_base_asks_for_the_sum(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    out = session.forward({"q": X}, base={"q": X + 5})
    assert torch.equal(out["q"], X + 5)
    with pytest.raises(slotcar_client.RequestInvalid):
        session.forward({"q": X}, base={"k": X})
    with pytest.raises(slotcar_client.RequestInvalid):
        session.forward({})


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(1, 3, 4), torch.zeros(3, 4, dtype=torch.float64)])
def test_what_is_no_matrix_of_a_known_dtype_is_not_sent(session: Session, engine: FakeEngine, x: torch.Tensor) -> None:
    session.set_mapping([("sql", 3)])
    with pytest.raises(slotcar_client.ShapeMismatch):
        session.forward({"q": x})
    assert engine.named("Forward") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_strides_and_dtypes_travel(session: Session, dtype: torch.dtype) -> None:
    session.set_mapping([("sql", 4)])
    wide = torch.randn(8, 8).to(dtype)
    for x in (wide[::2, 1:5], wide.T[:4, ::2], wide[:1, :4].expand(4, 4), wide[4:, 4:]):
        out = session.forward({"q": x})["q"]
        assert out.dtype == dtype
        assert torch.equal(out, x)


def test_a_stale_mapping_is_set_again_by_digest_and_the_call_repeated(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 2), (BASE, 1)])
    engine.script = [STALE, STALE, None]
    session.forward({"q": X})
    refs = [[entry.ref for entry in request.targets] for request in engine.named("SetMapping")]
    assert refs == [["sql", ""], [f"sql@{A}", ""], [f"sql@{A}", ""]]
    assert [request.generation for request in engine.named("Forward")] == [1, 2, 3]
    assert session.recoveries == {"LAYOUT_STALE": 2}


def test_a_name_that_moved_is_not_followed(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    engine.adapters["sql"] = B
    session.forward({"q": X})
    engine.script = [STALE]
    with pytest.raises(slotcar_client.AdapterNotFound) as caught:
        session.forward({"q": X})
    assert caught.value.metadata["adapters"] == f"sql@{A}"
    assert session.set_mapping([("sql", 3)]).digests == {"sql": B}
    session.forward({"q": X})


def test_recovery_ends(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    engine.script = [STALE] * 100
    with pytest.raises(slotcar_client.LayoutStale):
        session.forward({"q": X})
    assert len(engine.named("Forward")) == MAX_STEPS


def test_a_mapping_that_the_server_forgot_is_set_again(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    engine.sessions[session.session_id].clear()
    session.forward({"q": X})
    assert session.recoveries == {"MAPPING_NOT_FOUND": 1}


def test_a_session_that_the_server_forgot_is_opened_again(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    before = session.session_id
    engine.sessions.clear()
    engine.epoch = "e2"
    session.forward({"q": X})
    assert session.session_id != before
    assert session.recoveries == {"SESSION_NOT_FOUND": 1}
    assert session.mapping is not None
    assert session.mapping.version.epoch == "e2"
    assert session.layout.version.epoch == "e2"


def test_set_mapping_opens_a_forgotten_session_too(session: Session, engine: FakeEngine) -> None:
    engine.sessions.clear()
    session.set_mapping([("sql", 3)])
    session.forward({"q": X})
    assert session.recoveries == {"SESSION_NOT_FOUND": 1}


def test_several_mappings_live_side_by_side(session: Session, engine: FakeEngine) -> None:
    first = session.set_mapping([("sql", 3)], mapping_id=10)
    second = session.set_mapping([("chat", 3)], mapping_id=11)
    session.forward({"q": X}, mapping=first)
    session.forward({"q": X})
    assert [request.mapping_id for request in engine.named("Forward")] == [10, 11]
    engine.sessions.clear()
    session.forward({"q": X}, mapping=first)
    session.forward({"q": X}, mapping=second)
    assert session.recoveries == {"SESSION_NOT_FOUND": 1, "MAPPING_NOT_FOUND": 1}


def test_a_mapping_that_was_replaced_is_not_taken_for_the_new_one(session: Session, engine: FakeEngine) -> None:
    old = session.set_mapping([("sql", 3)])
    session.set_mapping([("chat", 3)])
    with pytest.raises(slotcar_client.MappingNotFound):
        session.forward({"q": X}, mapping=old)
    assert engine.named("Forward") == []


def test_after_a_failed_set_mapping_nothing_goes_to_the_mapping_before(session: Session) -> None:
    old = session.set_mapping([("sql", 3)])
    with pytest.raises(slotcar_client.AdapterNotFound):
        session.set_mapping([("nope", 3)])
    with pytest.raises(slotcar_client.MappingNotFound):
        session.forward({"q": X})
    session.forward({"q": X}, mapping=old)


def test_release_is_idempotent_and_final(session: Session, engine: FakeEngine) -> None:
    mapping = session.set_mapping([("sql", 3)])
    session.release_mapping()
    session.release_mapping()
    session.release_mapping(mapping)
    assert len(engine.named("ReleaseMapping")) == 1
    for call in (lambda: session.forward({"q": X}), lambda: session.forward({"q": X}, mapping=mapping)):
        with pytest.raises(slotcar_client.MappingNotFound):
            call()


@pytest.mark.parametrize("digest", [B, ""])
def test_an_answer_computed_with_other_digests_is_thrown_away(
    session: Session, engine: FakeEngine, digest: str
) -> None:
    session.set_mapping([("sql", 3)])
    engine.spoil = lambda response: response.digests.__setitem__(0, digest)
    with pytest.raises(slotcar_client.AuditFailed):
        session.forward({"q": X})
    assert session.recoveries == {}


def test_the_callers_errors_come_back_and_the_session_goes_on(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    engine.script = [server_errors.SiteUnknown("items[0].site", "q"), server_errors.InternalError()]
    for kind in (slotcar_client.SiteUnknown, slotcar_client.InternalError):
        with pytest.raises(kind):
            session.forward({"q": X})
    session.forward({"q": X})
    assert len(engine.named("ForwardStream")) == (session.transport == "stream")


def test_a_message_over_the_limit_is_not_sent(client: Client, engine: FakeEngine) -> None:
    engine.max_message_bytes = 1000
    with client.session() as session:
        session.set_mapping([("sql", 3)])
        with pytest.raises(slotcar_client.CapacityExceeded):
            session.forward({"q": torch.zeros(3, 100)})
        session.forward({"q": X})
        assert len(engine.named("Forward")) == 1


def test_a_stream_that_ends_fails_one_call(client: Client, engine: FakeEngine) -> None:
    with client.session() as session:
        session.set_mapping([("sql", 3)])
        session.forward({"q": X})
        engine.script = [EndStreamError()]
        with pytest.raises(slotcar_client.Unavailable):
            session.forward({"q": X})
        session.forward({"q": X})
        assert len(engine.named("ForwardStream")) == 2


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_call_without_an_answer_ends_and_its_late_answer_is_nobodys(
    tmp_path: Path, engine: FakeEngine, transport: str
) -> None:
    with FakeServer(tmp_path, engine) as server, slotcar_client.connect(server.target, timeout_seconds=1) as client:
        session = client.session(transport=transport)
        session.set_mapping([("sql", 3)])
        engine.answer.clear()
        with pytest.raises(slotcar_client.DeadlineExceeded):
            session.forward({"q": X})
        engine.answer.set()
        for value in range(5):
            assert torch.equal(session.forward({"q": X + value})["q"], X + value)


def test_the_answer_to_an_interrupted_call_is_nobodys(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    session.forward({"q": X})
    engine.answer.clear()
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        session.forward({"q": X})
    engine.answer.set()
    for value in range(5):
        assert torch.equal(session.forward({"q": X + value})["q"], X + value)


def test_a_signal_handler_may_close_the_session_in_the_middle_of_a_call(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    session.forward({"q": X})
    engine.answer.clear()
    main = threading.main_thread().ident
    assert main is not None

    def close(*_: object) -> None:
        session.close()
        engine.answer.set()

    before = signal.signal(signal.SIGUSR1, close)
    try:
        threading.Thread(
            target=lambda: (
                eventually(lambda: len(engine.named("Forward")) == 2),
                signal.pthread_kill(main, signal.SIGUSR1),
            )
        ).start()
        with contextlib.suppress(slotcar_client.SlotcarError):
            session.forward({"q": X})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert engine.sessions == {}


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


def test_rows_maps_once_and_releases(session: Session, engine: FakeEngine) -> None:
    followed: list[Any] = []
    session.follow_rows(followed.append)
    with session.rows(["sql", BASE]) as mapping:
        assert mapping.row_counts is None
        session.forward({"q": X}, row_counts=[2, 1], mapping=mapping)
        with pytest.raises(slotcar_client.RequestInvalid), session.rows(["chat"]):
            pass
    assert followed == [None, mapping, None]
    assert len(engine.named("SetMapping")) == len(engine.named("ReleaseMapping")) == 1
    with pytest.raises(slotcar_client.MappingNotFound):
        session.forward({"q": X}, row_counts=[2, 1], mapping=mapping)


def test_rows_resolves_names_anew_each_time(session: Session, engine: FakeEngine) -> None:
    with session.rows(["sql"]) as mapping:
        assert mapping.digests == {"sql": A}
    engine.adapters["sql"] = B
    with session.rows(["sql"]) as mapping:
        assert mapping.digests == {"sql": B}


def test_rows_of_a_mapping_that_is_set_does_not_map_again(session: Session, engine: FakeEngine) -> None:
    mapping = session.set_mapping(["sql", BASE])
    for _ in range(3):
        with session.rows(mapping):
            session.forward({"q": X}, row_counts=[2, 1], mapping=mapping)
    assert len(engine.named("SetMapping")) == 1
    assert engine.named("ReleaseMapping") == []


def test_rows_leaves_the_default_mapping_alone(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    with session.rows(["chat"]):
        session.forward({"q": X})
    session.forward({"q": X})
    assert [request.mapping_id for request in engine.named("Forward")] == [1, 1]


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


def test_a_release_that_failed_can_be_repeated(
    session: Session, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping = session.set_mapping([("sql", 1)])
    call = session._rpc.call

    def away(*_: object, **__: object) -> None:
        raise slotcar_client.Unavailable("away")

    monkeypatch.setattr(session._rpc, "call", away)
    with pytest.raises(slotcar_client.Unavailable):
        session.release_mapping()
    monkeypatch.setattr(session._rpc, "call", call)
    assert not engine.named("ReleaseMapping")
    session.release_mapping(mapping)
    assert len(engine.named("ReleaseMapping")) == 1


@pytest.mark.parametrize("mapping_id", [-1, 2, 1 << 64])
def test_a_mapping_id_that_cannot_be_used_is_refused(session: Session, mapping_id: int) -> None:
    with pytest.raises(slotcar_client.RequestInvalid):
        session.set_mapping([("sql", 1)], mapping_id=mapping_id)


@pytest.mark.parametrize("counts", [[-1], [True], [1.0], ["1"]])
def test_row_counts_that_are_none_are_refused(session: Session, counts: list[int]) -> None:
    session.set_mapping([("sql", 1)])
    with pytest.raises(slotcar_client.RequestInvalid):
        session.forward({"site": torch.zeros(1, 4)}, row_counts=counts)


def test_set_mapping_sends_what_it_was_asked_for(session: Session, engine: FakeEngine) -> None:
    session.set_mapping([("sql", 3)])
    session.set_mapping([("sql", 3)], load=True, wait_seconds=1.5)
    first, second = engine.named("SetMapping")
    assert (first.load, first.HasField("wait")) == (False, False)
    assert (second.load, second.wait.ToMilliseconds()) == (True, 1500)


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


def test_on_stale_may_refuse_and_the_session_goes_on(client: Client, engine: FakeEngine) -> None:
    told: list[tuple[Mapping, str]] = []

    def on_stale(mapping: Mapping, error: slotcar_client.SlotcarError) -> None:
        told.append((mapping, error.metadata["entries"]))
        if len(told) == 1:
            raise RuntimeError("repeat the step")

    with client.session(on_stale=on_stale) as session:
        mapping = session.set_mapping([("sql", 3)])
        engine.script = [STALE, STALE]
        with pytest.raises(RuntimeError, match="repeat the step"):
            session.forward({"q": X})
        assert len(engine.named("SetMapping")) == 1
        session.forward({"q": X})
        assert told == [(mapping, "sql"), (mapping, "sql")]
        assert session.recoveries == {"LAYOUT_STALE": 1}


def test_on_stale_may_use_the_session(client: Client, engine: FakeEngine) -> None:
    with client.session(on_stale=lambda *_: opened.close()) as opened:
        opened.set_mapping([("sql", 3)])
        engine.script = [STALE]
        with pytest.raises(slotcar_client.SessionClosed):
            opened.forward({"q": X})


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
