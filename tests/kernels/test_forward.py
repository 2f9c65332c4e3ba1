"""Sites of every kind against float64: embeddings, experts, parts side by side, vectors; with NaN around all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from slotcar_kernels.cpu import Kernel
from slotcar_kernels.forward import BadAux, NeedsBase, PartSlots, SiteCall, prepare
from slotcar_kernels.plan import plan_by_row, plan_rows, slots_by_row
from slotcar_kernels.reference import lora_rows
from slotcar_kernels.seed import BIAS, GAIN
from slotcar_kernels.sites import SiteSlots

from tests.kernels.cases import Entries, entries_of, padded, rows_of, site_slots
from tests.tolerances import TOLERANCES, assert_close, assert_same_bits

TOKENS, EXPERTS, SLOTS = 11, 3, 5
ENTRIES: Entries = [(3, 2), (None, 1), (0, 3), (1, 2), (4, 1), (3, 1), (None, 2), (2, 4)]
ROWS = rows_of(ENTRIES)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def indices(count: int, rows: int = ROWS, seed: int = 5) -> torch.Tensor:
    """int32 [rows, 1]; every number is there."""
    numbers = torch.arange(rows) % count
    return numbers[torch.randperm(rows, generator=torch.Generator().manual_seed(seed))].to(torch.int32)[:, None]


def embedding_slots(width: int, dtype: torch.dtype = torch.float32) -> SiteSlots:
    site = site_slots(TOKENS, width, dtype)
    return SiteSlots(site.a.transpose(1, 2).contiguous(), site.b, site.ranks, site.scales, embedding=True)


def expert_slots(in_features: int, width: int, dtype: torch.dtype = torch.float32) -> SiteSlots:
    """Each slot and expert has a rank of its own; slots are further apart than their experts."""
    ranks = [(7 * index) % 18 for index in range(SLOTS * EXPERTS - 1)]
    flat = site_slots(in_features, width, dtype, ranks=ranks)

    def spread(values: torch.Tensor) -> torch.Tensor:
        wide = torch.full((SLOTS, EXPERTS + 2, *values.shape[1:]), math.nan, dtype=dtype)
        wide[:, 1 : EXPERTS + 1] = values.view(SLOTS, EXPERTS, *values.shape[1:])
        return wide[:, 1 : EXPERTS + 1]

    return SiteSlots(spread(flat.a), spread(flat.b), (*ranks, 0), flat.scales)


def by_row(slots: Sequence[int | None]) -> Entries:
    return [(slot, 1) for slot in slots]


def slots_of(entries: Entries) -> list[int | None]:
    return [slot for slot, count in entries for _ in range(count)]


@pytest.mark.parametrize("slot_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_embeddings(kernel: Kernel, slot_dtype: torch.dtype, dtype: torch.dtype, adds: bool) -> None:
    slots, ids = embedding_slots(37, slot_dtype), indices(TOKENS)
    base = random(ROWS, 37, dtype=dtype) if adds else None
    out = padded(torch.full((ROWS, 37), math.nan, dtype=dtype))
    prepare(plan_rows(ENTRIES), [SiteCall([PartSlots(slots)], out.view, None, base, ids)], kernel)()
    assert_close(out.view, lora_rows(ENTRIES, ids[:, 0].long(), slots, base))
    out.assert_rest_untouched()
    for row, slot in enumerate(slots_of(ENTRIES)):
        if slot is None:
            assert_same_bits(out.view[row], torch.zeros(37, dtype=dtype) if base is None else base[row])


@pytest.mark.parametrize("slot_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_experts(kernel: Kernel, slot_dtype: torch.dtype, dtype: torch.dtype, adds: bool) -> None:
    slots, experts, x = expert_slots(19, 37, slot_dtype), indices(EXPERTS), random(ROWS, 19, dtype=dtype)
    base = random(ROWS, 37, seed=1, dtype=dtype) if adds else None
    out = padded(torch.full((ROWS, 37), math.nan, dtype=dtype))
    prepare(plan_rows(ENTRIES), [SiteCall([PartSlots(slots)], out.view, x, base, experts)], kernel)()
    of_rows = [
        None if slot is None else slot * EXPERTS + expert
        for slot, expert in zip(slots_of(ENTRIES), experts[:, 0].tolist(), strict=True)
    ]
    assert_close(out.view, lora_rows(by_row(of_rows), x, slots, base))
    out.assert_rest_untouched()


def test_what_aux_says_is_read_at_each_run(kernel: Kernel) -> None:
    slots, ids = embedding_slots(8), indices(TOKENS)
    out = torch.empty(ROWS, 8)
    run = prepare(plan_rows(ENTRIES), [SiteCall([PartSlots(slots)], out, aux=ids)], kernel)
    run()
    ids.copy_(ids.flip(0))
    run()
    assert_close(out, lora_rows(ENTRIES, ids[:, 0].long(), slots))


@pytest.mark.parametrize("wrong", [-1, TOKENS, -(2**31), 2**31 - 1])
def test_a_number_that_is_none_is_refused_before_anything_is_written(kernel: Kernel, wrong: int) -> None:
    slots, ids, x = embedding_slots(8), indices(TOKENS), random(ROWS, 19)
    outs = [torch.full((ROWS, 8), 7.0) for _ in range(3)]
    calls = [
        SiteCall([PartSlots(site_slots(19, 8))], outs[0], x),
        SiteCall([PartSlots(expert_slots(19, 8))], outs[1], x, aux=indices(EXPERTS)),
        SiteCall([PartSlots(slots)], outs[2], aux=ids),
    ]
    run = prepare(plan_rows(ENTRIES), calls, kernel)
    ids[2] = wrong  # also in a row of BASE
    with pytest.raises(BadAux) as refused:
        run()
    assert (refused.value.index, refused.value.found, refused.value.wanted) == (2, wrong, f"0 to {TOKENS - 1}")
    assert all((out == 7).all() for out in outs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["add", "delta", "in place"])
def test_parts_side_by_side_with_vectors(kernel: Kernel, dtype: torch.dtype, mode: str) -> None:
    """The first part has none, the second for some slots; y_base is the base, or aux where nothing is added to."""
    flags = [0, GAIN, BIAS, GAIN | BIAS, 0, 0, 0, 0, 0]
    vectors = random(9, 2, 10, seed=4)
    vectors[[0, 4, 5, 6, 7, 8]], vectors[1, 1], vectors[2, 0] = math.nan, math.nan, math.nan
    parts = [PartSlots(site_slots(19, 24, seed=1)), PartSlots(site_slots(19, 10, seed=2), vectors, flags)]
    x, y = random(ROWS, 19, dtype=dtype), random(ROWS, 34, seed=3, dtype=dtype)
    out = padded(y if mode == "in place" else torch.full_like(y, math.nan))
    base = {"add": y, "delta": None, "in place": out.view}[mode]
    call = SiteCall(parts, out.view, x, base, y if mode == "delta" else None)
    prepare(plan_rows(ENTRIES), [call], kernel)()
    wanted = torch.cat([lora_rows(ENTRIES, x, part.slots) for part in parts], 1)
    for row, slot in enumerate(slots_of(ENTRIES)):
        if slot is not None and flags[slot] & GAIN:
            wanted[row, 24:] += vectors[slot, 0].double() * y[row, 24:].double()
        if slot is not None and flags[slot] & BIAS:
            wanted[row, 24:] += vectors[slot, 1].double()
    wanted = wanted if mode == "delta" else wanted + y.double()
    relative, absolute = TOLERANCES[dtype]
    # Rounded twice: where there are vectors, the seed is, before the rest is added.
    torch.testing.assert_close(out.view.double(), wanted, rtol=2 * relative, atol=8 * relative + absolute)
    assert_close(out.view[:, :24].contiguous(), wanted[:, :24])
    out.assert_rest_untouched()
    for row in (2, 10, 11):
        assert_same_bits(out.view[row], torch.zeros_like(y[row]) if mode == "delta" else y[row])


def test_a_gain_needs_the_base_only_where_its_slot_has_rows(kernel: Kernel) -> None:
    part = PartSlots(site_slots(19, 8), torch.zeros(9, 2, 8), [0, GAIN, BIAS, 0, 0, 0, 0, 0, 0])
    x = random(2, 19)
    calls = [SiteCall([part], torch.empty(2, 8), x)]
    prepare(plan_rows([(0, 1), (2, 1), (1, 0)]), calls, kernel)()
    with pytest.raises(NeedsBase):
        prepare(plan_rows([(0, 1), (1, 1)]), calls, kernel)


def test_calls_with_one_input_are_one_launch(kernel: Kernel) -> None:
    x, twin = random(2, 19), random(2, 19)
    calls = [SiteCall([PartSlots(site_slots(19, 8))], torch.empty(2, 8), given) for given in (x, twin, x)]
    assert len(prepare(plan_rows([(0, 2)]), calls, kernel).launches) == 2


@pytest.mark.parametrize("popularity", ["uniform", "zipf", "identical"])
@pytest.mark.parametrize("count", [0, 1, 17, 100])
def test_a_plan_by_rows_is_that_of_the_entries(popularity: str, count: int) -> None:
    entries = entries_of(popularity, count, base=0.2, ragged=True)
    slots = slots_by_row(plan_rows(entries))
    assert slots.tolist() == [-1 if slot is None else slot for slot in slots_of(entries)]
    plan = plan_by_row(slots)
    assert plan.rows == rows_of(entries)
    assert sorted(plan.order.tolist()) == list(range(plan.rows)) if plan.order is not None else plan.rows == 0
    assert slots_by_row(plan).tolist() == slots.tolist()


def test_no_rows(kernel: Kernel) -> None:
    aux = torch.empty(0, 1, dtype=torch.int32)
    calls = [
        SiteCall([PartSlots(embedding_slots(8))], torch.empty(0, 8), aux=aux),
        SiteCall([PartSlots(expert_slots(19, 8))], torch.empty(0, 8), torch.empty(0, 19), aux=aux),
    ]
    prepare(plan_rows([]), calls, kernel)()
