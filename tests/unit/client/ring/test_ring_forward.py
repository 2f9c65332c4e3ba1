"""Forward over the ring, against a sidecar that does as it is told: what travels, what comes back, what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar.shm import region
from slotcar_client import Session
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A
from tests.unit.client.ring.fake_ring import FakeRing, RingEngine

X = torch.arange(12.0).reshape(3, 4)
STALE = server_errors.LayoutStale("stale", entries=("sql",))


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
