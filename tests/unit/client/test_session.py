"""What a session does with each answer, shown by a server that gives it."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar_client import BASE, Client, Mapping, Session
from slotcar_client.recovery import MAX_STEPS
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, B, EndStreamError, FakeEngine, FakeServer
from tests.waiting import eventually

X = torch.arange(12.0).reshape(3, 4)
STALE = server_errors.LayoutStale("stale", entries=("sql",))


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
