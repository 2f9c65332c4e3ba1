"""Forwards whose results are not wanted yet: order, room, recovery, and what becomes of those that nobody reads."""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import pytest
import slotcar_client
import torch
from slotcar.shm import region
from slotcar_client import BASE, Client, PendingForward, Session
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A
from tests.unit.client.ring.fake_ring import FakeRing, RingEngine, silent, time_is_over_when
from tests.waiting import eventually

X = torch.arange(12.0).reshape(3, 4)
STALE = server_errors.LayoutStale("stale", entries=("sql",))
MANY = 3 * region.CELLS


def sent(session: Session, *values: float) -> list[PendingForward]:
    return [session.forward_async({"q": X + value}) for value in values]


def test_several_are_under_way_and_each_has_its_own_result(session: Session, ring: FakeRing) -> None:
    ring.answer.clear()
    pending = sent(session, 1, 2, 3)
    assert [one.done() for one in pending] == [False] * 3
    ring.answer.set()
    assert torch.equal(pending[2].result()["q"], X + 3)
    eventually(pending[0].done)
    assert torch.equal(pending[0].result()["q"], X + 1)
    assert torch.equal(pending[0].result()["q"], X + 1)
    assert torch.equal(pending[1].result()["q"], X + 2)
    assert all(one.done() for one in pending)
    assert [forward.items[0].x_offset for forward in ring.forwards] == sorted(
        {forward.items[0].x_offset for forward in ring.forwards}
    )


def test_other_calls_go_on_meanwhile(session: Session) -> None:
    first = session.forward_async({"q": X})
    assert torch.equal(session.forward({"q": X + 5})["q"], X + 5)
    session.fence()
    other = session.set_mapping([("chat", 3)], mapping_id=4)
    assert torch.equal(session.forward({"q": X + 6}, mapping=other)["q"], X + 6)
    assert torch.equal(first.result()["q"], X)


def test_base_is_added_to(session: Session) -> None:
    assert torch.equal(session.forward_async({"q": X}, [3, 0], {"q": X}).result()["q"], 2 * X)


def test_when_there_are_no_cells_left_it_waits_for_the_oldest(session: Session, ring: FakeRing) -> None:
    pending = sent(session, *range(MANY))
    for value in reversed(range(MANY)):
        assert torch.equal(pending[value].result()["q"], X + value)
    assert len(ring.hellos) == 1


def test_when_the_arena_is_full_it_waits_for_the_oldest(small: Session, ring: FakeRing) -> None:
    large = torch.zeros(50, 4)
    pending = [small.forward_async({"q": large + value}, [50, 0]) for value in range(9)]
    assert {forward.items[0].x_offset for forward in ring.forwards} == {0, 1664}
    for value, one in enumerate(pending):
        assert torch.equal(one.result()["q"], large + value)
    assert len(ring.hellos) == 1


def test_what_nobody_reads_leaves_nothing(session: Session, ring: FakeRing) -> None:
    session.forward({"q": X})
    x = X.clone()
    gone = weakref.ref(x)
    for value in range(MANY):
        session.forward_async({"q": X + value})
    session.forward_async({"q": x})
    del x
    gc.collect()
    assert gone() is None
    pending = sent(session, *range(region.CELLS))
    for value, one in enumerate(pending):
        assert torch.equal(one.result()["q"], X + value)
    assert len(ring.hellos) == 1


def test_a_stale_answer_is_recovered_from_when_the_result_is_wanted(
    session: Session, ring: FakeRing, engine: RingEngine
) -> None:
    engine.script = [STALE, STALE, None]
    first, second = sent(session, 1, 2)
    ring.kinds.clear()
    assert torch.equal(first.result()["q"], X + 1)
    assert torch.equal(second.result()["q"], X + 2)
    assert [entry.ref for entry in engine.named("SetMapping")[-1].targets] == [f"sql@{A}", ""]
    assert session.recoveries == {"LAYOUT_STALE": 2}


def test_sessions_that_were_forgotten_are_opened_once_for_all_that_was_under_way(
    session: Session, ring: FakeRing, engine: RingEngine
) -> None:
    ring.answer.clear()
    pending = sent(session, 1, 2, 3)
    engine.sessions.clear()
    ring.answer.set()
    for value, one in enumerate(pending, 1):
        assert torch.equal(one.result()["q"], X + value)
    assert len(engine.named("OpenSession")) == 2
    assert session.recoveries == {"SESSION_NOT_FOUND": 3}


def test_what_was_under_way_when_the_connection_ended_is_computed_again(session: Session, ring: FakeRing) -> None:
    ring.reply = silent
    pending = sent(session, 1, 2)
    eventually(lambda: len(ring.connections[0].late) == 2)
    ring.reply = lambda reply: None
    ring.connections[0].end()
    eventually(pending[1].done)
    for value, one in enumerate(pending, 1):
        assert torch.equal(one.result()["q"], X + value)
    assert len(ring.hellos) == 2


def test_an_answer_that_came_before_the_connection_ended_counts(session: Session, ring: FakeRing) -> None:
    (pending,) = sent(session, 1)
    eventually(pending.done)
    ring.connections[0].end()
    assert torch.equal(session.forward({"q": X})["q"], X)
    assert torch.equal(pending.result()["q"], X + 1)
    assert len(ring.forwards) == 2


def test_closing_the_session_fails_what_is_under_way(session: Session, ring: FakeRing) -> None:
    ring.answer.clear()
    done, open_ = sent(session, 1, 2)
    ring.answer.set()
    done.result()
    session.close()
    assert done.result()
    assert open_.done()
    for _ in range(2):
        with pytest.raises(slotcar_client.SessionClosed):
            open_.result()
    with pytest.raises(slotcar_client.SessionClosed):
        session.forward_async({"q": X}).result()


def test_what_on_stale_raises_is_the_outcome(client: Client, ring: FakeRing, engine: RingEngine) -> None:
    class RepeatStep(Exception):
        pass

    def on_stale(*_: object) -> None:
        raise RepeatStep

    with client.session(transport="ring", on_stale=on_stale) as session:
        session.set_mapping([("sql", 3)])
        engine.script = [STALE]
        (pending,) = sent(session, 1)
        for _ in range(2):
            with pytest.raises(RepeatStep):
                pending.result()


def test_an_answer_that_is_late_is_that_calls_error(small: Session, ring: FakeRing) -> None:
    ring.reply = silent
    pending = sent(small, 1)[0]
    eventually(lambda: ring.connections[0].late)
    ring.reply = lambda reply: None
    later = sent(small, 2)[0]
    assert torch.equal(later.result()["q"], X + 2)
    for _ in range(2):
        with time_is_over_when(lambda: True), pytest.raises(slotcar_client.DeadlineExceeded):
            pending.result()


def test_room_that_is_never_free_is_an_error(small: Session, ring: FakeRing) -> None:
    ring.reply = silent
    pending = sent(small, *range(region.CELLS))
    with time_is_over_when(lambda: True), pytest.raises(slotcar_client.DeadlineExceeded):
        small.forward({"q": X})
    with pytest.raises(slotcar_client.DeadlineExceeded):
        pending[0].result()


def test_a_wait_for_a_result_that_is_interrupted_leaves_the_session_in_order(session: Session, ring: FakeRing) -> None:
    ring.answer.clear()
    first, second = sent(session, 1, 2)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        first.result()
    with pytest.raises(KeyboardInterrupt):
        first.result()
    ring.answer.set()
    assert torch.equal(second.result()["q"], X + 2)
    assert torch.equal(session.forward({"q": X + 3})["q"], X + 3)


def test_a_result_may_be_asked_for_by_several_threads(session: Session, ring: FakeRing) -> None:
    ring.answer.clear()
    (pending,) = sent(session, 1)
    found: list[dict[str, torch.Tensor]] = []
    threads = [threading.Thread(target=lambda: found.append(pending.result())) for _ in range(4)]
    for thread in threads:
        thread.start()
    ring.answer.set()
    for thread in threads:
        thread.join()
    assert len({id(outputs) for outputs in found}) == 1
    assert torch.equal(found[0]["q"], X + 1)


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_on_other_planes_it_is_computed_at_once(client: Client, engine: RingEngine, transport: str) -> None:
    with client.session(transport=transport) as session:
        session.set_mapping([("sql", 2), (BASE, 1)])
        pending = session.forward_async({"q": X})
        assert len(engine.named("Forward")) == 1
        assert pending.done()
        session.close()
        assert torch.equal(pending.result()["q"], X)


def test_every_failure_is_the_results(session: Session) -> None:
    session.release_mapping()
    with pytest.raises(slotcar_client.MappingReplaced):
        session.forward_async({"q": X}).result()
    session.set_mapping(["sql"])
    with pytest.raises(slotcar_client.RequestInvalid):
        session.forward_async({"q": X}).result()
