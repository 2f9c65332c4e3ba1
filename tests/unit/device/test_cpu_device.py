"""Each device: what a fill leaves in a slot, and what a prepared batch keeps. `devices` says which one is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from slotcar_kernels.buffers import DTYPES, buffer_from_tensor, tensor_from_buffer
from slotcar_kernels.reference import lora_delta
from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.ports import Device
from slotcar_sidecar.core.tensor import ITEM_BYTES, Matrix

from tests.fakes.weights import FakeWeights, fake_weights
from tests.tolerances import assert_close, assert_same_bits
from tests.unit.device.devices import AnyDevice, cpu_only, make_device

MODEL = ModelSpec.of([Site("k", 33, 18), Site("o", 40, 33), Site("q", 33, 40)])
MAX_RANK = 35
A, B, C = SlotId(0), SlotId(1), SlotId(2)

WIDE = fake_weights(MODEL, {"k": 20, "o": 7, "q": 33}, seed=1)
NARROW = fake_weights(MODEL, {"q": 3}, seed=2)
OTHER = fake_weights(MODEL, {"k": 1, "q": 16}, seed=3)


def device(slot_dtype: str = "float32") -> AnyDevice:
    made = make_device(3, MAX_RANK, slot_dtype)
    made.shape(MODEL)
    return made


def to_matrix(tensor: torch.Tensor) -> Matrix:
    dtype, rows, columns, data = buffer_from_tensor(tensor)
    return Matrix(dtype, rows, columns, columns, data)


def to_tensor(matrix: Matrix) -> torch.Tensor:
    return tensor_from_buffer(matrix.dtype, matrix.rows, matrix.columns, matrix.row_stride, matrix.data)


def random_matrix(rows: int, columns: int, dtype: str = "float32", seed: int = 0) -> Matrix:
    return to_matrix(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype]))


def truth(weights: FakeWeights | None, site: str, x: Matrix) -> torch.Tensor:
    part = {} if weights is None else {part.site: part for part in weights.adapter.parts}
    if weights is None or site not in part:
        return torch.zeros(x.rows, MODEL.by_name[site].out_features, dtype=torch.float64)
    return lora_delta(to_tensor(x), weights.a[site], weights.b[site], part[site].scale)


@dataclass(frozen=True)
class Rows:
    """One entry and the adapter that its rows must be computed with."""

    slot: SlotId | None
    count: int
    weights: FakeWeights | None


def assert_computes(target: AnyDevice, rows: Sequence[Rows], dtype: str = "float32") -> None:
    """Each entry's rows, at every site, are those of its adapter."""
    count = sum(entry.count for entry in rows)
    for site in MODEL.sites:
        x = random_matrix(count, site.in_features, dtype)
        batch = target.prepare([(entry.slot, entry.count) for entry in rows], [ForwardItem(site.name, x)])
        (found,) = target.execute(batch)
        owners = [entry.weights for entry in rows for _ in range(entry.count)]
        wanted = [truth(owner, site.name, x)[row] for row, owner in enumerate(owners)]
        assert_close(to_tensor(found), torch.stack(wanted))


def test_is_a_device() -> None:
    target: Device = device()
    assert (target.slots, target.max_rank, target.slot_dtype) == (3, MAX_RANK, "float32")
    assert DTYPES.keys() == ITEM_BYTES.keys()
    assert all(DTYPES[name].itemsize == size for name, size in ITEM_BYTES.items())


def test_slot_bytes() -> None:
    assert make_device(3, MAX_RANK).slot_bytes() == 0
    columns, vectors = 33 + 18 + 40 + 33 + 33 + 40, 2 * 4 * (18 + 33 + 40)
    assert device().slot_bytes() == 4 * MAX_RANK * columns + vectors == MODEL.slot_bytes(MAX_RANK, 4)
    assert device("bfloat16").slot_bytes() == 2 * MAX_RANK * columns + vectors


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_rows_are_computed_with_their_own_adapter(dtype: str) -> None:
    target = device()
    target.fill(A, WIDE)
    target.fill(C, NARROW)
    assert_computes(
        target, [Rows(C, 2, NARROW), Rows(None, 1, None), Rows(A, 3, WIDE), Rows(A, 0, WIDE), Rows(C, 1, NARROW)], dtype
    )


@pytest.mark.parametrize("slot_dtype", sorted(DTYPES))
def test_a_slot_matches_the_adapter_that_filled_it_and_no_other(slot_dtype: str) -> None:
    target = device(slot_dtype)
    target.fill(A, WIDE)
    target.fill(B, NARROW)
    assert target.matches(A, WIDE)
    assert target.matches(B, NARROW)
    assert not target.matches(A, NARROW)
    assert not target.matches(B, WIDE)
    assert not target.matches(C, WIDE), "never filled"


@pytest.mark.parametrize("slot_dtype", ["float16", "bfloat16"])
def test_16_bit_slots_compute_with_the_cast_weights(slot_dtype: str) -> None:
    target = device(slot_dtype)
    target.fill(A, WIDE)
    target.fill(B, NARROW)
    dtype = DTYPES[slot_dtype]
    cast = [
        replace(
            weights,
            a={site: value.to(dtype) for site, value in weights.a.items()},
            b={site: value.to(dtype) for site, value in weights.b.items()},
        )
        for weights in (WIDE, NARROW)
    ]
    assert_computes(target, [Rows(A, 2, cast[0]), Rows(B, 1, cast[1]), Rows(A, 1, cast[0])])


@pytest.mark.parametrize("file_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_files_fill_float32_slots_exactly(file_dtype: torch.dtype) -> None:
    target = device()
    weights = fake_weights(MODEL, {"k": 5, "q": 17}, dtype=file_dtype)
    target.fill(B, weights)
    assert target.matches(B, weights)
    assert_computes(target, [Rows(B, 4, weights)])


def test_a_refill_leaves_nothing_of_the_larger_adapter_before() -> None:
    target = device()
    target.fill(A, WIDE)
    target.fill(A, NARROW)
    assert target.matches(A, NARROW)
    assert_computes(target, [Rows(A, 3, NARROW)])
    for slots in (array for arrays in target._arrays.values() for array in (arrays.a, arrays.b)):
        assert not slots[A, 3:16].any()
        assert slots[A, 16:].isnan().all()
    for site in ("k", "o"):
        assert not target._arrays[site].a[A, :16].any(), "a site that is not targeted is zero"


def test_evict_and_reload_give_the_same_bytes_and_results_in_any_slot() -> None:
    target = device()
    x = random_matrix(1, 33)
    outputs = []
    for slot, weights in ((A, WIDE), (A, OTHER), (A, WIDE), (B, OTHER), (B, WIDE), (C, WIDE)):
        target.fill(slot, weights)
        if weights is WIDE:
            assert target.matches(slot, WIDE)
            batch = target.prepare([(slot, 1)], [ForwardItem("q", x), ForwardItem("k", x)])
            outputs.append([matrix.data for matrix in target.execute(batch)])
    assert all(output == outputs[0] for output in outputs)


def test_a_fill_touches_no_other_slot() -> None:
    target = device()
    target.fill(A, WIDE)
    target.fill(C, OTHER)
    target.fill(B, NARROW)
    assert target.matches(A, WIDE)
    assert target.matches(C, OTHER)


@pytest.mark.parametrize("column", ["a", "b"])
@pytest.mark.parametrize(("site", "row"), [("q", 0), ("q", 2), ("q", 3), ("q", 15), ("k", 0), ("o", 15)])
def test_one_wrong_value_is_found(column: str, site: str, row: int) -> None:
    target = device()
    target.fill(B, NARROW)
    getattr(target._arrays[site], column)[B, row, 5] += 1e-6
    assert not target.matches(B, NARROW)


def test_a_wrong_scale_is_found() -> None:
    target = device()
    target.fill(B, NARROW)
    (part,) = NARROW.adapter.parts
    scaled = replace(NARROW, adapter=replace(NARROW.adapter, parts=(replace(part, scale=part.scale * 2),)))
    assert not target.matches(B, scaled)


def test_a_fill_leaves_the_host_weights_as_they_were() -> None:
    copies = [tensor.clone() for tensor in (*WIDE.a.values(), *WIDE.b.values())]
    device().fill(A, WIDE)
    for tensor, copy in zip((*WIDE.a.values(), *WIDE.b.values()), copies, strict=True):
        assert_same_bits(tensor, copy)


@cpu_only
def test_a_prepared_batch_keeps_its_ranks_and_scales() -> None:
    target = device()
    target.fill(A, OTHER)
    target.fill(B, NARROW)
    x = random_matrix(2, 33)
    batch = target.prepare([(A, 1), (B, 1)], [ForwardItem("q", x)])
    before = bytes(target.execute(batch)[0].data)
    target.fill(C, WIDE)
    assert target.execute(batch)[0].data == before
    target._parts[A] = {}
    assert target.execute(batch)[0].data == before
    assert target.execute(target.prepare([(A, 1), (B, 1)], [ForwardItem("q", x)]))[0].data != before


def test_add_keeps_the_bits_of_base_rows() -> None:
    target = device()
    target.fill(A, NARROW)
    base = torch.randn(3, 40)
    base[1, 0], base[1, 1], base[1, 2] = -0.0, math.inf, math.nan
    x = random_matrix(3, 33)
    items = [ForwardItem("q", x, to_matrix(base)), ForwardItem("q", x)]
    added, delta = (to_tensor(found) for found in target.execute(target.prepare([(A, 1), (None, 1), (A, 1)], items)))
    assert_same_bits(added[1], base[1])
    assert not delta[1].any()
    rows = [0, 2]
    assert_close(added[rows], base[rows].to(torch.float64) + truth(NARROW, "q", x)[rows])


@cpu_only
def test_items_that_share_an_input_share_its_tensor_and_keep_their_order() -> None:
    target = device()
    target.fill(A, WIDE)
    shared, own = random_matrix(2, 33), random_matrix(2, 40, seed=1)
    twin = replace(shared)
    items = [ForwardItem("k", shared), ForwardItem("o", own), ForwardItem("q", shared), ForwardItem("q", twin)]
    batch = target.prepare([(A, 2)], items)
    assert len(batch.forward.launches) == 3
    for item, found in zip(items, target.execute(batch), strict=True):
        assert_close(to_tensor(found), truth(WIDE, item.site, item.x))


def test_strided_inputs() -> None:
    target = device()
    target.fill(A, WIDE)
    data = buffer_from_tensor(torch.randn(3, 50))[3]
    x = Matrix.checked("x", "float32", 3, 33, 50, data[: 4 * (2 * 50 + 33)])
    (found,) = target.execute(target.prepare([(A, 3)], [ForwardItem("q", x)]))
    assert_close(to_tensor(found), truth(WIDE, "q", x))


@pytest.mark.parametrize("entries", [[], [(A, 0)], [(None, 0)]])
def test_no_rows(entries: list[tuple[SlotId | None, int]]) -> None:
    target = device()
    (found,) = target.execute(target.prepare(entries, [ForwardItem("q", Matrix("float16", 0, 33, 33, b""))]))
    assert found == Matrix("float16", 0, 40, 40, b"")


def with_value(weights: FakeWeights, column: str, site: str, value: float) -> FakeWeights:
    tensors = {name: tensor.clone() for name, tensor in getattr(weights, column).items()}
    tensors[site][1, 1] = value
    return replace(weights, **{column: tensors})


@pytest.mark.parametrize("value", [65_520.0, -1e6])
@pytest.mark.parametrize(("column", "tensor"), [("a", "q.lora_A"), ("b", "q.lora_B")])
def test_values_that_float16_slots_cannot_hold_are_refused_before_a_write(
    column: str, tensor: str, value: float
) -> None:
    target = device("float16")
    target.fill(A, WIDE)
    with pytest.raises(AdapterInvalid) as refused:
        target.fill(A, with_value(NARROW, column, "q", value))
    assert refused.value.facts["tensor"] == tensor
    assert refused.value.facts["found"] == str(abs(value))
    assert refused.value.facts["wanted"] == "at most 65504.0 for float16 slots"
    assert target.matches(A, WIDE)


def test_the_largest_values_fit() -> None:
    target = device("float16")
    largest = with_value(NARROW, "a", "q", 65_519.0)
    target.fill(A, largest)
    assert target.matches(A, largest)
    assert target._arrays["q"].a[A, 1, 1] == 65_504
    wide = device("bfloat16")
    wide.fill(A, with_value(NARROW, "a", "q", 3.3e38))
    with pytest.raises(AdapterInvalid, match="bfloat16"):
        wide.check(with_value(NARROW, "a", "q", 3.4e38))
    with pytest.raises(AdapterInvalid, match="float16"):
        target.check(with_value(fake_weights(MODEL, {"q": 3}, dtype=torch.bfloat16), "a", "q", 1e6))


def test_an_adapter_that_does_not_fit_the_model_is_refused_before_a_write() -> None:
    target = device()
    target.fill(A, WIDE)
    strange = fake_weights(ModelSpec.of([Site("q", 33, 41)]), {"q": 3})
    with pytest.raises(AdapterInvalid):
        target.fill(A, strange)
    with pytest.raises(AdapterInvalid):
        target.fill(A, fake_weights(MODEL, {"q": MAX_RANK + 1}))
    assert target.matches(A, WIDE)


@pytest.mark.parametrize("max_rank", [5, 16, 17, 32])
def test_the_padded_rank_ends_at_the_largest_rank(max_rank: int) -> None:
    target = make_device(2, max_rank)
    target.shape(MODEL)
    weights = fake_weights(MODEL, {"k": max_rank, "q": 1})
    target.fill(B, weights)
    assert target.matches(B, weights)
    assert target._arrays["q"].a[A].isnan().all()
    x = random_matrix(2, 33)
    (found,) = target.execute(target.prepare([(B, 2)], [ForwardItem("k", x)]))
    assert_close(to_tensor(found), truth(weights, "k", x))
