"""Calls through a ring whose mapping, session, connection or answer is not what it should be, and the end of one."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar.shm import region
from slotcar_client import Client, Session
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, B
from tests.unit.client.ring.fake_ring import FakeRing, Reply, RingEngine, Silence, silent, time_is_over_when
from tests.waiting import eventually

X = torch.arange(12.0).reshape(3, 4)
STALE = server_errors.LayoutStale("stale", entries=("sql",))


def test_a_stale_mapping_is_set_again_by_digest(session: Session, ring: FakeRing, engine: RingEngine) -> None:
    engine.script = [STALE, STALE, None]
    assert torch.equal(session.forward({"q": X})["q"], X)
    refs = [[entry.ref for entry in request.targets] for request in engine.named("SetMapping")]
    assert refs == [["sql", ""], [f"sql@{A}", ""], [f"sql@{A}", ""]]
    assert session.recoveries == {"LAYOUT_STALE": 2}
    assert len(ring.hellos) == 1


def test_a_session_that_was_forgotten_is_opened_anew_with_a_connection_of_its_own(
    session: Session, ring: FakeRing, engine: RingEngine
) -> None:
    engine.sessions.clear()
    assert torch.equal(session.forward({"q": X})["q"], X)
    assert [hello.session for hello in ring.hellos] == ["s0", "s1"]
    assert session.recoveries == {"SESSION_NOT_FOUND": 1}
    assert ring.connections[0].over.wait(20)


def test_a_connection_that_ended_is_made_again(session: Session, ring: FakeRing) -> None:
    ring.connections[0].end()
    assert torch.equal(session.forward({"q": X})["q"], X)
    assert session.recoveries == {}
    ring.connections[1].end()
    session.fence()
    assert len(ring.hellos) == 3


def test_a_connection_that_ends_in_the_middle_of_a_call_is_made_again(session: Session, ring: FakeRing) -> None:
    def end(_: Reply) -> None:
        ring.reply = lambda _: None
        ring.connections[0].end()
        raise Silence

    ring.reply = end
    assert torch.equal(session.forward({"q": X})["q"], X)
    assert len(ring.hellos) == 2


def test_a_connection_that_ends_again_and_again_is_an_error(session: Session, ring: FakeRing) -> None:
    ring.before = lambda kind: ring.connections[-1].end()
    ring.reply = silent
    with pytest.raises(slotcar_client.Unavailable):
        session.forward({"q": X})
    assert len(ring.hellos) == 2


def test_a_mapping_of_another_life_of_the_server_is_set_again(session: Session, engine: RingEngine) -> None:
    other = session.set_mapping([("chat", 3)], mapping_id=5)
    engine.sessions.clear()
    engine.epoch = "fedcba9876543210"
    session.fence()
    assert torch.equal(session.forward({"q": X}, mapping=other)["q"], X)
    assert session.recoveries == {"SESSION_NOT_FOUND": 1, "MAPPING_NOT_FOUND": 1}


def test_an_answer_computed_with_other_digests_is_thrown_away(session: Session, ring: FakeRing) -> None:
    ring.reply = lambda reply: setattr(reply, "fingerprint", region.fingerprint([B, ""]))
    with pytest.raises(slotcar_client.AuditFailed):
        session.forward({"q": X})
    with pytest.raises(slotcar_client.AuditFailed):
        session.forward_async({"q": X}).result()
    ring.reply = lambda reply: None
    assert session.forward({"q": X})


@pytest.mark.parametrize(
    "spoilt",
    [
        {"status": 2},
        {"status": region.Status.ERROR, "payload": b"\xff\xff"},
        {"status": region.Status.ERROR, "payload_bytes": region.PAYLOAD_BYTES + 1},
        {"status": region.Status.ERROR, "payload_bytes": (1 << 32) - 1},
    ],
)
def test_garbage_in_an_answer_is_one_calls_error(session: Session, ring: FakeRing, spoilt: dict[str, Any]) -> None:
    def spoil(reply: Reply) -> None:
        for name, value in spoilt.items():
            setattr(reply, name, value)

    ring.reply = spoil
    with pytest.raises(slotcar_client.AuditFailed):
        session.forward({"q": X})
    with pytest.raises(slotcar_client.AuditFailed):
        session.fence()
    ring.reply = lambda reply: None
    assert session.forward({"q": X})


@pytest.mark.parametrize("payload", [b"\xff\xff", b"\x00" * region.PAYLOAD_BYTES])
def test_a_response_that_is_none_is_an_error(session: Session, ring: FakeRing, payload: bytes) -> None:
    ring.reply = lambda reply: setattr(reply, "payload", payload)
    with pytest.raises(slotcar_client.AuditFailed):
        session.set_mapping([("sql", 3)])


def test_an_error_without_a_message_is_an_error(session: Session, ring: FakeRing) -> None:
    ring.reply = lambda reply: setattr(reply, "status", region.Status.ERROR)
    with pytest.raises(slotcar_client.SlotcarError):
        session.forward({"q": X})


def test_an_answer_with_another_sequence_is_no_answer(small: Session, ring: FakeRing) -> None:
    ring.reply = lambda reply: setattr(reply, "sequence", reply.sequence + 1)
    rung = threading.Event()
    ring.rung = lambda kind: rung.set()
    with time_is_over_when(rung.is_set), pytest.raises(slotcar_client.DeadlineExceeded):
        small.forward({"q": X})


def test_a_late_answer_is_nobodys(small: Session, ring: FakeRing) -> None:
    ring.reply = silent
    with time_is_over_when(lambda: ring.connections[0].late), pytest.raises(slotcar_client.DeadlineExceeded):
        small.forward({"q": X})
    ring.reply = lambda reply: None
    place = ring.forwards[0].items[0].out_offset
    for value in range(3):
        assert torch.equal(small.forward({"q": X + value})["q"], X + value)
    assert place not in {forward.items[0].out_offset for forward in ring.forwards[1:]}
    ring.connections[0].answer_late()
    assert torch.equal(small.forward({"q": X + 9})["q"], X + 9)
    assert ring.forwards[-1].items[0].out_offset == place, "what it held is free again"
    assert len(ring.hellos) == 1


def test_when_all_cells_wait_for_late_answers_the_connection_is_made_again(small: Session, ring: FakeRing) -> None:
    ring.reply = silent
    pending = [small.forward_async({"q": X}) for _ in range(region.CELLS)]
    for one in pending:
        with time_is_over_when(lambda: True), pytest.raises(slotcar_client.DeadlineExceeded):
            one.result()
    eventually(lambda: len(ring.connections[0].late) == region.CELLS)
    ring.reply = lambda reply: None
    assert torch.equal(small.forward({"q": X})["q"], X)
    assert len(ring.hellos) == 2


def test_when_late_answers_hold_the_arena_the_connection_is_made_again(small: Session, ring: FakeRing) -> None:
    ring.reply = silent
    large = torch.zeros(100, 4)
    with time_is_over_when(lambda: ring.connections[0].late), pytest.raises(slotcar_client.DeadlineExceeded):
        small.forward({"q": large}, [100, 0])
    ring.reply = lambda reply: None
    assert torch.equal(small.forward({"q": large + 1}, [100, 0])["q"], large + 1)
    assert len(ring.hellos) == 2


def test_the_answer_to_an_interrupted_call_is_nobodys(session: Session, ring: FakeRing) -> None:
    session.forward({"q": X})
    ring.answer.clear()
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        session.forward({"q": X})
    ring.answer.set()
    for value in range(5):
        assert torch.equal(session.forward({"q": X + value})["q"], X + value)


def test_closing_ends_the_connection_and_leaves_the_outputs(client: Client, ring: FakeRing) -> None:
    session = client.session(transport="ring")
    session.set_mapping([("sql", 3)])
    out = session.forward({"q": X})["q"]
    session.close()
    session.close()
    assert ring.connections[0].over.wait(20)
    assert torch.equal(out, X)
    with pytest.raises(slotcar_client.SessionClosed):
        session.forward({"q": X})


def test_a_session_that_was_forgotten_by_its_owner_ends_its_connection(client: Client, ring: FakeRing) -> None:
    session = client.session(transport="ring")
    session._choice.transport._line._cells.connection.close()  # type: ignore[attr-defined]
    assert ring.connections[0].over.wait(20)
    session.set_mapping([("sql", 3)])
    assert torch.equal(session.forward({"q": X})["q"], X)


def test_a_signal_handler_may_close_the_session_in_the_middle_of_a_call(session: Session, ring: FakeRing) -> None:
    session.forward({"q": X})
    ring.answer.clear()
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, lambda *_: session.close())
    try:
        threading.Thread(
            target=lambda: (eventually(lambda: len(ring.forwards) == 2), signal.pthread_kill(main, signal.SIGUSR1))
        ).start()
        with pytest.raises(slotcar_client.SessionClosed):
            session.forward({"q": X})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(ring.hellos) == 1


def test_a_child_of_this_process_does_not_end_the_connection(
    session: Session, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process id stands for the fork itself, a copy of the socket for the parent's."""
    parents = session._choice.transport._line.cells.connection.link.dup()  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(slotcar_client.ClientClosed, match="fork"):
        session.forward({"q": X})
    session._choice.close()
    assert not ring.connections[0].over.wait(0.1)
    parents.close()
    assert ring.connections[0].over.wait(20)


def test_a_session_may_be_used_by_several_threads(session: Session) -> None:
    wrong: list[object] = []

    def work(value: int) -> None:
        for step in range(50):
            x = X + value * 100 + step
            out = session.forward({"q": x}) if step % 2 else session.forward_async({"q": x}).result()
            if not torch.equal(out["q"], x):
                wrong.append((value, step))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_rank_says_which_it_is(client: Client, ring: FakeRing) -> None:
    with client.session(transport="ring", ranks=2) as owner:
        with client.join(owner.session_id, 1, transport="ring") as rank:
            rank.set_mapping([(f"sql@{A}", 3)])
            assert torch.equal(rank.forward({"q": X})["q"], X)
        assert [(hello.session, hello.rank) for hello in ring.hellos] == [(owner.session_id, 0), (owner.session_id, 1)]
