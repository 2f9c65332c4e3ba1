"""The CPU kernels against float64 truth, with NaN wherever it must not read and around what it may write."""

from __future__ import annotations

import math

import pytest
import torch
from slotcar_kernels.cpu import Kernel, lora_forward
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.reference import lora_rows
from slotcar_kernels.sites import SiteSlots

from tests.kernels.cases import (
    MAX_RANK,
    POPULARITIES,
    RANKS,
    SLOTS,
    USED_SLOTS,
    Entries,
    entries_of,
    padded,
    rows_of,
    site_slots,
)
from tests.tolerances import assert_close, assert_same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = ((64, 96), (33, 130), (130, 33))
MODES = ("delta", "add")


def compute(
    kernel: Kernel, entries: Entries, x: torch.Tensor, site: SiteSlots, base: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.full((x.shape[0], site.out_features), math.nan, dtype=x.dtype)
    lora_forward(plan_rows(entries), x, [site], [out], [base], kernel=kernel)
    return out


def inputs(entries: Entries, site: SiteSlots, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in] and base [rows, out]."""
    generator = torch.Generator().manual_seed(rows_of(entries))
    x = torch.randn(rows_of(entries), site.in_features, generator=generator)
    return x.to(dtype), torch.randn(len(x), site.out_features, generator=generator).to(dtype)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize(("count", "ragged"), [(1, False), (8, False), (40, False), (12, True)])
def test_agrees_with_the_reference(
    kernel: Kernel, popularity: str, count: int, ragged: bool, dtype: torch.dtype, mode: str, widths: tuple[int, int]
) -> None:
    entries = entries_of(popularity, count, base=0.2, ragged=ragged)
    site = site_slots(*widths)
    x, base = inputs(entries, site, dtype)
    added = base if mode == "add" else None
    assert_close(compute(kernel, entries, x, site, added), lora_rows(entries, x, site, added))


@pytest.mark.parametrize("slot_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_float32_for_16_bit_slots(kernel: Kernel, slot_dtype: torch.dtype, dtype: torch.dtype) -> None:
    entries = entries_of("uniform", 20, base=0.2)
    site = site_slots(130, 64, slot_dtype)
    x, base = inputs(entries, site, dtype)
    assert_close(compute(kernel, entries, x, site, base), lora_rows(entries, x, site, base))


@pytest.mark.parametrize("slot", range(USED_SLOTS), ids=[f"rank {rank}" for rank in RANKS])
@pytest.mark.parametrize("mode", MODES)
def test_each_rank(kernel: Kernel, slot: int, mode: str) -> None:
    entries: Entries = [(slot, 3)]
    site = site_slots(64, 96)
    x, base = inputs(entries, site)
    added = base if mode == "add" else None
    assert_close(compute(kernel, entries, x, site, added), lora_rows(entries, x, site, added))


@pytest.mark.parametrize("rows", [63, 64, 65, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_segment_longer_than_a_block(kernel: Kernel, rows: int, dtype: torch.dtype, mode: str) -> None:
    entries: Entries = [(4, rows), (None, 2), (3, rows)]
    site = site_slots(48, 40)
    x, base = inputs(entries, site, dtype)
    added = base if mode == "add" else None
    assert_close(compute(kernel, entries, x, site, added), lora_rows(entries, x, site, added))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("popularity", ["distinct", "zipf"])
def test_strided_rows_are_read_and_written_alone(
    kernel: Kernel, popularity: str, mode: str, dtype: torch.dtype
) -> None:
    entries = entries_of(popularity, USED_SLOTS, base=0.2)
    site = site_slots(33, 130)
    x, base = inputs(entries, site, dtype)
    added = padded(base).view if mode == "add" else None
    out = padded(torch.zeros_like(base))
    lora_forward(plan_rows(entries), padded(x).view, [site], [out.view], [added], kernel=kernel)
    assert_close(out.view, lora_rows(entries, x, site, added))
    out.assert_rest_untouched()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("entries", [[(0, 1), (3, 2), (None, 1), (4, 3)], entries_of("zipf", 24)], ids=["stay", "move"])
def test_a_repeat_gives_the_same_bits_wherever_the_tensors_lie(
    kernel: Kernel, entries: Entries, mode: str, dtype: torch.dtype
) -> None:
    site = site_slots(130, 130)
    x, base = inputs(entries, site, dtype)
    added = base if mode == "add" else None
    first = compute(kernel, entries, x, site, added)
    assert_same_bits(compute(kernel, entries, x, site, added), first)
    for offset in range(1, 18):
        out = padded(torch.zeros_like(base), gap=offset % 3, offset=offset)
        lora_forward(
            plan_rows(entries),
            padded(x, gap=offset % 4, offset=offset).view,
            [site],
            [out.view],
            [added],
            kernel=kernel,
        )
        assert_same_bits(out.view, first)


def special_values(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """-0.0, infinities, subnormals and NaNs with a payload, among ordinary values."""
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    values = torch.randn(rows, columns).to(dtype)
    nan = torch.tensor([math.nan], dtype=dtype).view(bits) | 5
    special = [torch.tensor([value], dtype=dtype) for value in (-0.0, math.inf, -math.inf)]
    values[:, :5] = torch.cat([*special, torch.tensor([3], dtype=bits).view(dtype), nan.view(dtype)])
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "entries",
    [[(None, 2), (0, 1), (5, 2), (None, 1)], [(0, 1), (None, 2), (5, 1), (0, 1), (5, 1)]],
    ids=["stay", "move"],
)
def test_rows_without_a_delta_have_the_bits_of_base_or_zero(
    kernel: Kernel, entries: Entries, dtype: torch.dtype
) -> None:
    site = site_slots(64, 40)
    assert site.ranks[5] == 0
    x, _ = inputs(entries, site, dtype)
    base = special_values(len(x), 40, dtype)
    slots = [slot for slot, count in entries for _ in range(count)]
    without = torch.tensor([slot in (None, 5) for slot in slots])
    x[without] = math.nan
    assert_same_bits(compute(kernel, entries, x, site, base)[without], base[without])
    assert_same_bits(compute(kernel, entries, x, site)[without], torch.zeros_like(base)[without])
    in_place = base.clone()
    lora_forward(plan_rows(entries), x, [site], [in_place], [in_place], kernel=kernel)
    assert_same_bits(in_place[without], base[without])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", ["distinct", "zipf"])
def test_in_place_is_the_same_as_out_of_place(kernel: Kernel, popularity: str, dtype: torch.dtype) -> None:
    entries = entries_of(popularity, 8, base=0.2)
    site = site_slots(64, 96)
    x, base = inputs(entries, site, dtype)
    in_place = base.clone()
    lora_forward(plan_rows(entries), x, [site], [in_place], [in_place], kernel=kernel)
    assert_same_bits(in_place, compute(kernel, entries, x, site, base))


def test_add_is_base_plus_delta(kernel: Kernel) -> None:
    entries = entries_of("uniform", 30)
    site = site_slots(64, 96)
    x, base = inputs(entries, site)
    torch.testing.assert_close(
        compute(kernel, entries, x, site, base), base + compute(kernel, entries, x, site), rtol=0, atol=0
    )


def test_a_bad_row_stays_a_row(kernel: Kernel) -> None:
    entries: Entries = [(0, 3), (3, 1), (0, 1)]
    site = site_slots(64, 96)
    x, _ = inputs(entries, site)
    good = compute(kernel, entries, x, site)
    x[1] = math.nan
    found = compute(kernel, entries, x, site)
    assert found[1].isnan().all()
    assert_same_bits(found[[0, 2, 3, 4]], good[[0, 2, 3, 4]])


@pytest.mark.parametrize("entries", [[(0, 1), (1, 2)], [(0, 1), (1, 1), (None, 1), (0, 1)]], ids=["stay", "move"])
def test_sites_that_share_an_input(kernel: Kernel, entries: Entries) -> None:
    sites = [site_slots(64, width, seed=width) for width in (96, 33, 8)]
    x, _ = inputs(entries, sites[0])
    outs = [torch.full((len(x), site.out_features), math.nan) for site in sites]
    bases = [None, torch.randn(len(x), 33), None]
    lora_forward(plan_rows(entries), x, sites, outs, bases, kernel=kernel)
    for site, out, base in zip(sites, outs, bases, strict=True):
        assert_close(out, lora_rows(entries, x, site, base))


@pytest.mark.parametrize("entries", [[], [(3, 0)]])
def test_no_rows(kernel: Kernel, entries: Entries) -> None:
    assert compute(kernel, entries, torch.empty(0, 64), site_slots(64, 96)).shape == (0, 96)


def test_a_long_batch_leaves_nothing_for_a_short_one(kernel: Kernel) -> None:
    site = site_slots(64, 96)
    for entries in (entries_of("uniform", 50), [(2, 1)], [(None, 1), (4, 1)], [(4, 1), (2, 1), (4, 1)]):
        x, base = inputs(entries, site)
        assert_close(compute(kernel, entries, x, site, base), lora_rows(entries, x, site, base))


def test_nothing_is_read_of_a_slot_that_is_not_used(kernel: Kernel) -> None:
    site = site_slots(64, 96)
    entries: Entries = [(0, 2), (3, 1)]
    x, _ = inputs(entries, site)
    wanted = compute(kernel, entries, x, site)
    for slot in set(range(site.a.shape[0])) - {0, 3}:
        site.a[slot], site.b[slot] = math.nan, math.nan
    assert_same_bits(compute(kernel, entries, x, site), wanted)


def test_inputs_and_slots_are_not_written(kernel: Kernel) -> None:
    site = site_slots(64, 96)
    entries = entries_of("zipf", 20)
    x, base = inputs(entries, site)
    before = [tensor.clone() for tensor in (x, base, site.a, site.b)]
    compute(kernel, entries, x, site, base)
    for tensor, copy in zip((x, base, site.a, site.b), before, strict=True):
        assert_same_bits(tensor, copy)


def test_tensors_that_require_grad_are_taken(kernel: Kernel) -> None:
    site = site_slots(64, 96)
    x, _ = inputs([(0, 2)], site)
    assert_same_bits(compute(kernel, [(0, 2)], x.clone().requires_grad_(), site), compute(kernel, [(0, 2)], x, site))


def refused(
    kernel: Kernel, entries: Entries, x: torch.Tensor, site: SiteSlots, out: torch.Tensor, base: torch.Tensor | None
) -> bool:
    before = out.clone()
    with pytest.raises(ValueError, match=r"wanted|no slot|outs"):
        lora_forward(plan_rows(entries), x, [site], [out], [base], kernel=kernel)
    return out.equal(before)


def test_what_does_not_fit_is_refused_before_anything_is_written(kernel: Kernel) -> None:
    site = site_slots(64, 96)
    entries: Entries = [(0, 2), (1, 1)]
    x, out = torch.randn(3, 64), torch.zeros(3, 96)
    assert refused(kernel, entries, x[:2], site, out, None)
    assert refused(kernel, entries, torch.randn(4, 64), site, out, None)
    assert refused(kernel, entries, torch.randn(3, 63), site, out, None)
    assert refused(kernel, entries, x.to(torch.bfloat16), site, out, None)
    assert refused(kernel, entries, x.to(torch.float64), site, out.to(torch.float64), None)
    assert refused(kernel, entries, x, site, torch.zeros(4, 96), None)
    assert refused(kernel, entries, x, site, out, torch.zeros(3, 95))
    assert refused(kernel, entries, x, site, out, torch.zeros(3, 96, dtype=torch.float16))
    assert refused(kernel, [(0, 2), (SLOTS, 1)], x, site, out, None)
    assert refused(kernel, entries, x, SiteSlots(site.a, site.b, [MAX_RANK + 1] * 9, site.scales), out, None)
    with pytest.raises(ValueError, match="outs"):
        lora_forward(plan_rows(entries), x, [site], [out, out], kernel=kernel)
