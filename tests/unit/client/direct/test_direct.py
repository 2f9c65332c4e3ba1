"""The direct plane against a writer whose steps are the test's: right numbers or an error, whatever happens when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from slotcar.v1 import engine_service_pb2, plane_pb2
from slotcar_client import errors
from slotcar_client.rpc import Rpc
from slotcar_client.transports import direct, mapped, shared_slots
from slotcar_client.transports.connection import Connection
from slotcar_client.transports.direct import DirectTransport
from slotcar_kernels import eager

from tests.fakes.weights import fake_weights
from tests.tolerances import assert_close, assert_same_bits
from tests.unit.client.direct.calls import DTYPES, connected, forward, rows, truth
from tests.unit.client.direct.slots_writer import MODEL, NARROW, A, B, C, FakeRpc, SlotsWriter

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("slot_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_those_of_their_adapters(slot_dtype: str, dtype: torch.dtype) -> None:
    slot_type: torch.dtype = getattr(torch, slot_dtype)
    weights = [fake_weights(MODEL, {"k": 3, "q": 8}, 1, slot_type), fake_weights(MODEL, {"q": 2}, 4, slot_type)]
    writer = SlotsWriter(slot_dtype=slot_dtype)
    for slot, each in enumerate(weights):
        writer.load(slot, each)
    transport = connected(writer)
    mapping = writer.map(1, None, 0, 1)
    x, y = rows(6, "q", dtype), rows(6, "o", dtype)
    found = transport.forward(forward(writer, mapping, (1, 2, 2, 1), {"q": x, "o": y, "k": x}))
    owners = [weights[1], None, None, weights[0], weights[0], weights[1]]
    assert found.keys() == {"q", "o", "k"}
    for site, output in found.items():
        assert output.dtype == dtype
        assert_close(output, truth(owners, site, y if site == "o" else x))


def test_base_is_added_and_kept_where_there_is_no_delta(writer: SlotsWriter, transport: DirectTransport) -> None:
    mapping, x = writer.map(0, None), rows(3, "q")
    base = {site: torch.randn(3, MODEL.by_name[site].out_features) for site in ("q", "k")}
    found = transport.forward(forward(writer, mapping, (2, 1), {"q": x, "k": x}, base))
    for site, output in found.items():
        assert_close(output, base[site].double() + truth([A, A, None], site, x))
        assert_same_bits(output[2:], base[site][2:])
    plain = transport.forward(forward(writer, mapping, (2, 1), {"q": x, "k": x}))
    assert_close(plain["q"], truth([A, A, None], "q", x))


def test_each_output_is_memory_of_its_own(writer: SlotsWriter, transport: DirectTransport) -> None:
    mapping, x = writer.map(0), rows(2, "q")
    first = transport.forward(forward(writer, mapping, (2,), {"q": x}))["q"]
    kept = first.clone()
    first.add_(1)
    second = transport.forward(forward(writer, mapping, (2,), {"q": rows(2, "q", seed=1)}))["q"]
    assert_same_bits(first, kept + 1)
    transport.close()
    writer.kill()
    assert_close(second, truth([A, A], "q", rows(2, "q", seed=1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_may_have_any_strides_and_one_dtype_each(
    writer: SlotsWriter, transport: DirectTransport, dtype: torch.dtype
) -> None:
    mapping, x = writer.map(0, 1), rows(3, "q", dtype)
    wide, y = torch.zeros(3, 50, dtype=dtype), rows(3, "o")
    wide[:, 7:31] = x
    base = {"q": torch.randn(40, 3).to(dtype).t(), "o": torch.randn(3, 24)}
    for q in (x, wide[:, 7:31], x.t().contiguous().t(), x.requires_grad_()):
        found = transport.forward(forward(writer, mapping, (1, 2), {"q": q, "o": y}, base))
        assert_close(found["q"], base["q"].double() + truth([A, B, B], "q", x.detach()))
        assert_close(found["o"], base["o"].double() + truth([A, B, B], "o", y))
        assert not found["q"].requires_grad


def test_no_rows_and_no_adapters(writer: SlotsWriter, transport: DirectTransport) -> None:
    assert transport.forward(forward(writer, writer.map(0), (0,), {"q": rows(0, "q")}))["q"].shape == (0, 40)
    found = transport.forward(forward(writer, writer.map(None), (2,), {"q": rows(2, "q")}))["q"]
    assert_same_bits(found, torch.zeros(2, 40))


def test_without_the_library_torch_computes_the_same(without_library: None, writer: SlotsWriter) -> None:
    transport, mapping, x = connected(writer), writer.map(0, 1), rows(3, "q")
    found = transport.forward(forward(writer, mapping, (2, 1), {"q": x}))["q"]
    assert_close(found, truth([A, A, B], "q", x))
    writer.begin(1, C)
    with pytest.raises(errors.LayoutStale):
        transport.forward(forward(writer, mapping, (2, 1), {"q": x}))


# What changes


def test_a_slot_that_begins_to_change_is_refused_and_named(writer: SlotsWriter, transport: DirectTransport) -> None:
    mapping, x = writer.map(0, None, 1, 1, 0), rows(5, "q")
    call = forward(writer, mapping, (1, 1, 1, 1, 1), {"q": x})
    assert_close(transport.forward(call)["q"], truth([A, None, B, B, A], "q", x))
    writer.begin(1, C)
    for _ in range(2):
        with pytest.raises(errors.LayoutStale, match="map again by digest") as caught:
            transport.forward(call)
        assert caught.value.metadata["entries"] == f"b@{B.adapter.digest}"
        assert int(caught.value.metadata["found"]) == writer.layout.generation
    writer.write(1, C)
    writer.publish(writer.layout.occupy(1))
    with pytest.raises(errors.LayoutStale):
        transport.forward(call)
    again = forward(writer, writer.map(0, None, 1, 1, 0), (1, 1, 1, 1, 1), {"q": x})
    assert_close(transport.forward(again)["q"], truth([A, None, C, C, A], "q", x))


def test_another_slot_that_changes_is_no_matter(writer: SlotsWriter, transport: DirectTransport) -> None:
    call = forward(writer, writer.map(0), (2,), {"q": rows(2, "q")})
    for weights in (C, NARROW, B):
        writer.load(1, weights)
        writer.load(2, A)
        assert_close(transport.forward(call)["q"], truth([A, A], "q", rows(2, "q")))


def test_an_entry_without_rows_makes_a_call_stale_too(writer: SlotsWriter, transport: DirectTransport) -> None:
    """As on every plane: a mapping is current, or it is not."""
    call = forward(writer, writer.map(0, 1), (2, 0), {"q": rows(2, "q")})
    transport.forward(call)
    writer.load(1, C)
    with pytest.raises(errors.LayoutStale):
        transport.forward(call)


def test_a_forced_unload_ends_the_mapping_at_once(writer: SlotsWriter, transport: DirectTransport) -> None:
    call = forward(writer, writer.map(0), (2,), {"q": rows(2, "q")})
    transport.forward(call)
    writer.unload_by_force(0)
    with pytest.raises(errors.LayoutStale):
        transport.forward(call)


def test_a_digest_that_comes_back_has_its_own_ranks_and_scales(writer: SlotsWriter, transport: DirectTransport) -> None:
    """A→C→A in one slot under one mapping id: nothing that was prepared for one is used for another."""
    x = rows(2, "q")
    for weights in (NARROW, A, NARROW, C):
        writer.load(0, weights)
        found = transport.forward(forward(writer, writer.map(0), (2,), {"q": x}))["q"]
        assert_close(found, truth([weights, weights], "q", x))


STEPS: dict[str, tuple[Callable[[SlotsWriter], Any], type[errors.SlotcarError]]] = {
    "begins": (lambda writer: writer.begin(0, C), errors.LayoutStale),
    "is refilled": (lambda writer: writer.load(0, C), errors.LayoutStale),
    "comes back": (lambda writer: (writer.load(0, C), writer.load(0, A)), errors.LayoutStale),
    "is forced": (lambda writer: writer.unload_by_force(0), errors.LayoutStale),
    "writer closes": (lambda writer: writer.close(), errors.Unavailable),
    "writer is killed": (lambda writer: writer.kill(), errors.Unavailable),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_happens_during_the_kernel_discards_its_result(
    writer: SlotsWriter, transport: DirectTransport, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, error = STEPS[name]
    compute = eager.lora_forward

    def compute_then_step(*arguments: Any) -> None:
        compute(*arguments)
        step(writer)

    monkeypatch.setattr("slotcar_kernels.cpu.isa_for", lambda kernel, sites: None)
    monkeypatch.setattr(eager, "lora_forward", compute_then_step)
    with pytest.raises(error):
        transport.forward(forward(writer, writer.map(0), (2,), {"q": rows(2, "q")}))


@pytest.mark.parametrize("name", STEPS)
def test_what_happens_before_the_parts_are_read_is_noticed(
    writer: SlotsWriter, transport: DirectTransport, name: str
) -> None:
    step, error = STEPS[name]
    mapping = writer.map(0)
    step(writer)
    with pytest.raises(error):
        transport.forward(forward(writer, mapping, (2,), {"q": rows(2, "q")}))


# The connection


def test_a_connection_that_ended_is_made_anew(writer: SlotsWriter, transport: DirectTransport) -> None:
    call = forward(writer, writer.map(0), (2,), {"q": rows(2, "q")})
    for end in (writer.end_connection, writer.cut):
        transport.forward(call)
        end()
        assert_close(transport.forward(call)["q"], truth([A, A], "q", rows(2, "q")))
    assert len(writer.links) == 3


def test_a_session_that_ended_is_told_as_the_server_tells_it(writer: SlotsWriter, transport: DirectTransport) -> None:
    call = forward(writer, writer.map(0), (2,), {"q": rows(2, "q")})
    transport.forward(call)
    writer.end_connection()
    writer.refusal = errors.SessionNotFound("no such session")
    for _ in range(2):
        with pytest.raises(errors.SessionNotFound):
            transport.forward(call)


def test_a_server_that_was_killed_is_away_and_comes_back_as_another_epoch(writer: SlotsWriter) -> None:
    lives = [writer]

    def connect(opened: engine_service_pb2.SessionOpened, plane: plane_pb2.Plane.ValueType) -> Connection:
        return lives[-1].connect(opened, plane)

    transport = DirectTransport(connect, cast(Rpc, FakeRpc()))
    transport.use(writer.opened)
    call = forward(writer, writer.map(0), (2,), {"q": rows(2, "q")})
    transport.forward(call)
    writer.kill()
    for _ in range(2):
        with pytest.raises(errors.Unavailable):
            transport.forward(call)
    again = SlotsWriter(epoch="fedcba9876543210")
    again.load(0, C)
    again.load(1, A)
    lives.append(again)
    transport.use(again.opened)
    with pytest.raises(errors.MappingNotFound, match="another life"):
        transport.forward(call)
    mapped = forward(again, again.map(1), (2,), {"q": rows(2, "q")})
    assert_close(transport.forward(mapped)["q"], truth([A, A], "q", rows(2, "q")))


def test_a_closed_transport_computes_nothing(writer: SlotsWriter, transport: DirectTransport) -> None:
    call = forward(writer, writer.map(0), (2,), {"q": rows(2, "q")})
    transport.forward(call)
    transport.close()
    transport.close()
    with pytest.raises(errors.SessionClosed):
        transport.forward(call)


def test_a_signal_handler_may_close_in_the_middle_of_a_call(
    writer: SlotsWriter, transport: DirectTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = forward(writer, writer.map(0), (2,), {"q": rows(2, "q")})
    transport.forward(call)
    readable = direct._readable

    def close_then_go_on(tensor: torch.Tensor) -> torch.Tensor:
        transport.close()
        return readable(tensor)

    monkeypatch.setattr(direct, "_readable", close_then_go_on)
    with pytest.raises(errors.SessionClosed):
        transport.forward(call)


# What it keeps


def test_the_writer_sees_which_mappings_compute(writer: SlotsWriter, transport: DirectTransport) -> None:
    first, second = writer.map(0, mapping_id=1), writer.map(1, mapping_id=2)
    x = rows(3, "q")
    for mapping in (first, second, second):
        transport.forward(forward(writer, mapping, (3,), {"q": x, "k": x, "o": rows(3, "o")}))
    found = [use for use in writer.uses() if use[0]]
    # q and k share their x: one unit; o is another.
    assert found == [(first.generation, 2, 6, 0), (second.generation, 4, 12, 0)]


def test_more_mappings_than_uses_take_turns(writer: SlotsWriter, transport: DirectTransport) -> None:
    x = rows(1, "q")
    mappings = [writer.map(0, mapping_id=number) for number in range(6)]
    for mapping in (*mappings, mappings[0]):
        transport.forward(forward(writer, mapping, (1,), {"q": x}))
    generations = [use[0] for use in writer.uses()]
    assert sorted(generations) == sorted(mapping.generation for mapping in (mappings[0], *mappings[3:]))
    transport.forward(forward(writer, mappings[3], (1,), {"q": x}))
    assert (mappings[3].generation, 2, 2, 0) in writer.uses()


def test_a_region_without_uses_is_as_good(writer: SlotsWriter) -> None:
    bare = SlotsWriter(uses=0)
    bare.load(0, A)
    transport = connected(bare)
    found = transport.forward(forward(bare, bare.map(0), (2,), {"q": rows(2, "q")}))["q"]
    assert_close(found, truth([A, A], "q", rows(2, "q")))


def test_a_call_is_prepared_once_and_caches_are_bounded(
    writer: SlotsWriter, transport: DirectTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, batches = counted(monkeypatch, shared_slots, "GuardedForward"), counted(monkeypatch, direct, "GuardedBatch")
    monkeypatch.setattr(mapped, "_MOST_MAPPINGS", 2)
    monkeypatch.setattr(direct, "_MOST_BATCHES", 3)
    x, mapping = rows(2, "q"), writer.map(0, 1)
    for _ in range(3):
        for counts in ((1, 1), (2, 0)):
            transport.forward(forward(writer, mapping, counts, {"q": x}))
    assert (len(sites), len(batches)) == (1, 2)
    for count in range(6):
        transport.forward(forward(writer, mapping, (count, 1), {"q": rows(count + 1, "q")}))
        transport.forward(forward(writer, writer.map(0, mapping_id=count), (2,), {"q": x}))
    assert len(sites) == 1
    assert transport._forwards is not None
    assert len(transport._forwards._mapped._made) == 2


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """Everything that is made of a class from now on."""
    made: list[Any] = []
    kind = getattr(module, name)

    def make(*arguments: Any) -> Any:
        made.append(kind(*arguments))
        return made[-1]

    monkeypatch.setattr(module, name, make)
    return made
