"""Forward over the ring, against a sidecar that does as it is told: what travels, what comes back, what is refused."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar.shm import region
from slotcar_client import Client, Session
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, B, eventually
from tests.unit.client.ring.fake_ring import FakeRing, Reply, RingEngine, Silence, silent, time_is_over_when

X = torch.arange(12.0).reshape(3, 4)
STALE = server_errors.LayoutStale("stale", entries=("sql",))


# What travels


def test_forward_answers_for_the_mapping(session: Session, ring: FakeRing) -> None:
    assert session.transport == "ring"
    assert torch.equal(session.forward({"q": X})["q"], X)
    first = ring.forwards[0]
    assert (first.row_counts, first.mapping_id, first.generation) == ((2, 1), 1, 1)
    assert torch.equal(session.forward({"q": X + 1}, row_counts=[1, 2])["q"], X + 1)
    assert ring.forwards[1].row_counts == (1, 2)
    assert ring.kinds == [region.Kind.SET_MAPPING, region.Kind.FORWARD, region.Kind.FORWARD]


def test_one_x_travels_once_and_outputs_are_the_callers(session: Session, ring: FakeRing) -> None:
    out = session.forward({"q": X, "o": X + 1, "k": X})
    q, k, o = ring.forwards[0].items
    assert q.x_offset == k.x_offset != o.x_offset
    out["q"].fill_(7)
    assert torch.equal(out["k"], X)
    assert torch.equal(out["o"], torch.cat([X + 1, X + 1], 1))
    twins = {"q": X, "k": X.clone()}
    assert torch.equal(session.forward(twins)["k"], X)
    assert len({item.x_offset for item in ring.forwards[1].items}) == 2


def test_base_is_added_to(session: Session, engine: RingEngine) -> None:
    y = torch.randn(3, 4)
    assert torch.equal(session.forward({"q": X}, base={"q": y})["q"], X + y)
    assert torch.equal(session.forward({"q": X})["q"], X)
    for base in ({"k": y}, {"q": y, "k": y}, {}):
        with pytest.raises(slotcar_client.RequestInvalid):
            session.forward({"q": X}, base=base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_outputs_have_the_dtype_of_x(session: Session, dtype: torch.dtype) -> None:
    out = session.forward({"q": X.to(dtype), "o": X.to(dtype)})
    assert {tensor.dtype for tensor in out.values()} == {dtype}
    assert torch.equal(out["q"], X.to(dtype))


def test_one_call_may_have_inputs_of_several_dtypes(session: Session) -> None:
    half = X.to(torch.float16)
    out = session.forward({"q": X, "k": half, "o": X}, base={"q": X, "k": half, "o": torch.zeros(3, 8)})
    assert torch.equal(out["q"], 2 * X)
    assert torch.equal(out["k"], 2 * half)
    assert out["k"].dtype == torch.float16
    assert torch.equal(session.forward_async({"q": X, "k": half}).result()["k"], half)


STRANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.cat([x, x], 1)[:, ::2][:, :4],
    "offset": lambda x: torch.cat([x, x])[1:4],
    "wide": lambda x: torch.cat([x, x], 1)[:, :4],
    "broadcast": lambda x: x[:1].expand(3, 4),
    "gradient": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x.clone()),
    "no rows": lambda x: x[:0],
}


@pytest.mark.parametrize("kind", STRANGE)
def test_any_tensor_of_the_right_shape_can_be_sent(session: Session, kind: str) -> None:
    x = STRANGE[kind](X)
    counts = [x.shape[0], 0]
    out = session.forward({"q": x, "o": x}, counts, base={"q": x, "o": torch.zeros(x.shape[0], 8)})
    assert not out["q"].requires_grad
    assert torch.equal(out["q"], 2 * x.detach())
    assert torch.equal(out["o"], torch.cat([x, x], 1).detach())


def test_equal_calls_are_equal_bytes(session: Session, ring: FakeRing) -> None:
    """What the sidecar prepared for a call serves the next."""
    for step in range(3):
        session.forward({"q": X + step})
        session.forward({"k": X, "o": X + 1})
        with contextlib.suppress(slotcar_client.ShapeMismatch):
            session.forward({"q": X[:2]})
    assert len(set(ring.payloads)) == 2
    ring.payloads.clear()
    pending = session.forward_async({"q": X})
    for _ in range(8):
        pending, before = session.forward_async({"q": X}), pending
        before.result()
    assert len(set(ring.payloads)) == 2


def test_a_mapping_that_was_replaced_at_the_same_generation_is_another(session: Session, engine: RingEngine) -> None:
    session.forward({"q": X})
    engine.generation -= 1
    session.set_mapping([("chat", 2), ("sql", 1)])
    assert session.mapping is not None
    assert session.mapping.generation == 1
    session.forward({"q": X})


# What is refused


@pytest.mark.parametrize(
    ("inputs", "error", "field"),
    [
        ({}, slotcar_client.RequestInvalid, "inputs"),
        ({"nowhere": X}, slotcar_client.SiteUnknown, None),
        ({"q": X[:2]}, slotcar_client.ShapeMismatch, "x of q"),
        ({"q": X[:, :3]}, slotcar_client.ShapeMismatch, "x of q"),
        ({"q": X[0]}, slotcar_client.ShapeMismatch, "x of q"),
        ({"q": X[None]}, slotcar_client.ShapeMismatch, "x of q"),
        ({"q": X.double()}, slotcar_client.ShapeMismatch, "x of q"),
        ({"q": X.int()}, slotcar_client.ShapeMismatch, "x of q"),
    ],
)
def test_what_does_not_fit_is_not_sent(
    session: Session, ring: FakeRing, inputs: Any, error: type[slotcar_client.SlotcarError], field: str | None
) -> None:
    for _ in range(2):
        with pytest.raises(error) as caught:
            session.forward(inputs)
        assert caught.value.metadata.get("field") == field
        with pytest.raises(error):
            session.forward_async(inputs).result()
    assert ring.forwards == []
    assert session.forward({"q": X})


@pytest.mark.parametrize("base", [X[:2], X[:, :3], X.half(), X.double()])
def test_a_base_that_does_not_fit_is_not_sent(session: Session, base: torch.Tensor) -> None:
    session.forward({"q": X}, base={"q": X})
    with pytest.raises(slotcar_client.ShapeMismatch) as caught:
        session.forward({"q": X}, base={"q": base})
    assert caught.value.metadata["field"] == "base of q"


def test_a_call_that_is_larger_than_the_arena_is_refused(small: Session) -> None:
    with pytest.raises(slotcar_client.CapacityExceeded) as caught:
        small.forward({"q": torch.zeros(1000, 4)}, [1000, 0])
    assert caught.value.metadata == {"found": "32000", "wanted": "4096"}
    assert small.forward({"q": X})


def test_a_mapping_with_more_entries_than_a_cell_has_room_for_is_refused(session: Session, ring: FakeRing) -> None:
    entries = [("sql", 0)] * 20_000
    session.set_mapping([*entries, ("sql", 3)])
    with pytest.raises(slotcar_client.CapacityExceeded):
        session.forward({"q": X})
    session.set_mapping([("sql", 3)])
    assert session.forward({"q": X})


def test_errors_of_the_server_come_back_and_the_connection_goes_on(
    session: Session, ring: FakeRing, engine: RingEngine
) -> None:
    engine.script = [server_errors.SiteUnknown("items[0].site", "q"), server_errors.InternalError()]
    for kind in (slotcar_client.SiteUnknown, slotcar_client.InternalError):
        with pytest.raises(kind):
            session.forward({"q": X})
    with pytest.raises(slotcar_client.AdapterNotFound):
        session.set_mapping(["nobody"], mapping_id=9)
    assert session.forward({"q": X}, mapping=session.set_mapping([("sql", 3)]))
    assert len(ring.hellos) == 1


# Recovery


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


# Answers that are none


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


# Answers that are late


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


# The other calls


def test_mappings_and_fences_travel_on_the_ring_the_rest_does_not(
    session: Session, ring: FakeRing, engine: RingEngine
) -> None:
    session.fence()
    session.release_mapping()
    session.release_hold(session.hold("sql"))
    kinds = [region.Kind(kind).name for kind in ring.kinds]
    assert kinds == ["SET_MAPPING", "FENCE", "RELEASE_MAPPING"]
    assert [name for name, _ in engine.calls] == [
        *("OpenSession", "SetMapping", "Fence", "ReleaseMapping", "HoldAdapter", "ReleaseHold")
    ]


def test_what_may_be_queued_or_has_no_room_in_a_cell_goes_over_grpc(
    session: Session, ring: FakeRing, engine: RingEngine
) -> None:
    ring.kinds.clear()
    session.set_mapping([("sql", 3)], wait_seconds=1)
    many = [f"adapter-{number}" for number in range(1000)]
    engine.adapters |= dict.fromkeys(many, A)
    assert len(session.set_mapping(many).entries) == 1000
    assert ring.kinds == []
    assert session.forward({"q": X}, [1] * 3 + [0] * 997)


# The end


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
