"""What a session does with each answer, shown by a server that gives it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar_client import BASE, Client, Session
from slotcar_client.recovery import MAX_STEPS
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, B, EndStreamError, FakeEngine, FakeServer

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


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
    refs = [[entry.ref for entry in request.entries] for request in engine.named("SetMapping")]
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
    engine.generation = 40
    time.sleep(0.05)
    assert session.layout.version.generation == 41


def test_close_ends_everything(client: Client, engine: FakeEngine) -> None:
    session = client.session()
    session.set_mapping([("sql", 3)])
    session.forward({"q": X})
    session.close()
    session.close()
    assert len(engine.named("CloseSession")) == 1
    assert not [t for t in threading.enumerate() if t.name == "slotcar-session"]
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
