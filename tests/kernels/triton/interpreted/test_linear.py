"""Linear sites in Triton's interpreter against float64: mixes, ranks, widths, dtypes, strides, slices, modes."""

from __future__ import annotations

import math

import pytest
import torch
from slotcar_kernels.sites import SiteSlots

from tests.kernels.cases import POPULARITIES, USED_SLOTS, Entries, entries_of, site_slots
from tests.kernels.triton.interpreted.batch import ODD_GAP, Batch, load
from tests.tolerances import assert_close, assert_same_bits

full = pytest.mark.full
FLOAT32, FLOAT16, BFLOAT16 = DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODES = ("delta", "add", "in place")
DECODE, PREFILL = 64, 513  # buckets
RANK_0 = 5  # the slot that has it


def mixed(count: int = 24, popularity: str = "uniform") -> Entries:
    return entries_of(popularity, count, base=0.2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_decode(dtype: torch.dtype, mode: str) -> None:
    Batch(mixed(), [site_slots(520, 136, dtype)], dtype, mode).check()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, pytest.param(FLOAT16, marks=full)], ids=str)
def test_prefill(dtype: torch.dtype) -> None:
    entries: Entries = [(4, 70), (None, 5), (1, 3), (4, 20), (RANK_0, 2), (3, 64)]
    Batch(entries, [site_slots(136, 136, dtype)], dtype, "add", PREFILL).check()


@full
@pytest.mark.parametrize("bucket", [DECODE, PREFILL])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_every_mix(popularity: str, dtype: torch.dtype, bucket: int) -> None:
    entries = entries_of(popularity, 10, base=0.2, ragged=True)
    Batch(entries, [site_slots(264, 136, dtype)], dtype, "add", bucket).check()


@full
@pytest.mark.parametrize("rank", [1, 15, 16, 17, 32, 33, 48, 100, 128, 255, 256])
@pytest.mark.parametrize("bucket", [DECODE, PREFILL])
def test_every_rank_beside_others(rank: int, bucket: int) -> None:
    site = site_slots(136, 72, BFLOAT16, ranks=(rank, 0, 3, 256))
    Batch([(0, 3), (2, 2), (1, 1), (3, 2)], [site], BFLOAT16, "add", bucket).check()


@pytest.mark.parametrize("dtype", [BFLOAT16, pytest.param(FLOAT32, marks=full), pytest.param(FLOAT16, marks=full)])
@pytest.mark.parametrize("widths", [(33, 130), pytest.param((1030, 1), marks=full), pytest.param((7, 257), marks=full)])
@pytest.mark.parametrize("bucket", [DECODE, pytest.param(PREFILL, marks=full)])
def test_odd_widths(widths: tuple[int, int], dtype: torch.dtype, bucket: int) -> None:
    Batch(mixed(8), [site_slots(*widths, dtype)], dtype, "add", bucket, ODD_GAP).check()


@pytest.mark.parametrize("bucket", [DECODE, pytest.param(PREFILL, marks=full)])
@pytest.mark.parametrize(
    "widths", [(200, 33, 8), pytest.param((128, 64), marks=full), pytest.param((1, 1), marks=full)]
)
@pytest.mark.parametrize("mode", ["in place", pytest.param("delta", marks=full)])
def test_slices(widths: tuple[int, ...], mode: str, bucket: int) -> None:
    """Parts with ranks of their own, at places of their own in memory; some slots have a part and not another."""
    sites = []
    for index, width in enumerate(widths):
        ranks = [(5 * slot + 11 * index) % 33 for slot in range(USED_SLOTS)]
        sites.append(site_slots(72, width, BFLOAT16, index, ranks))
    Batch(mixed(12), sites, BFLOAT16, mode, bucket).check()


@pytest.mark.parametrize("slot_dtype", [BFLOAT16, pytest.param(FLOAT16, marks=full), pytest.param(FLOAT32, marks=full)])
@pytest.mark.parametrize("dtype", [FLOAT32, pytest.param(FLOAT16, marks=full), pytest.param(BFLOAT16, marks=full)])
def test_slots_of_another_dtype(dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    Batch(mixed(8), [site_slots(136, 72, slot_dtype)], dtype, "add").check()


@full
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 64])
def test_a_segment_longer_than_a_tile(rows: int) -> None:
    Batch([(4, rows)], [site_slots(136, 72, BFLOAT16)], BFLOAT16).check()


def test_slots_far_from_each_other() -> None:
    """A slot's parts are views: strides of slots and of ranks are larger than what they hold."""
    site = site_slots(64, 48, BFLOAT16)
    a = torch.full((9, 40, 96), math.nan, dtype=BFLOAT16)
    b = torch.full((9, 40, 80), math.nan, dtype=BFLOAT16)
    a[:, :32, 16:80], b[:, :32, 8:56] = site.a, site.b
    Batch(mixed(8), [SiteSlots(a[:, :32, 16:80], b[:, :32, 8:56], site.ranks, site.scales)], BFLOAT16).check()


def special_values(values: torch.Tensor) -> torch.Tensor:
    """-0.0, infinities, a subnormal and a NaN with a payload, among ordinary values."""
    bits = {4: torch.int32, 2: torch.int16}[values.itemsize]
    nan = torch.tensor([math.nan], dtype=values.dtype).view(bits) | 5
    special = [torch.tensor([value], dtype=values.dtype) for value in (-0.0, math.inf, -math.inf)]
    tiny = torch.tensor([3], dtype=bits).view(values.dtype)
    values[:, :5] = torch.cat([*special, tiny, nan.view(values.dtype)])
    return values


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32, pytest.param(FLOAT16, marks=full)])
@pytest.mark.parametrize("entries", [[(None, 2), (0, 1), (RANK_0, 2), (None, 1)], [(None, 19)]], ids=["some", "all"])
def test_rows_without_a_delta_keep_their_bits(entries: Entries, dtype: torch.dtype, mode: str) -> None:
    batch = Batch(entries, [site_slots(64, 40, dtype)], dtype, mode)
    without = torch.tensor([slot in (-1, RANK_0) for slot in batch.slots])
    batch.x.view[: batch.rows][without] = math.nan
    special_values(batch.base.view[: batch.rows])
    if mode == "in place":
        batch.out.view[: batch.rows].copy_(batch.base.view[: batch.rows])
    wanted = torch.zeros(batch.rows, 40, dtype=dtype) if mode == "delta" else batch.base.view[: batch.rows]
    assert_same_bits(batch.run()[without], wanted[without])


def test_no_rows() -> None:
    assert Batch([], [site_slots(64, 40)], FLOAT32).run().shape == (0, 40)


def test_a_bad_row_stays_a_row() -> None:
    batches = [Batch([(0, 3), (3, 1), (0, 1)], [site_slots(64, 40, BFLOAT16)], BFLOAT16) for _ in range(2)]
    batches[1].x.view[1] = math.nan
    good, found = (batch.run() for batch in batches)
    assert_close(good, batches[0].truth())
    assert found[1].isnan().all()
    assert_same_bits(found[[0, 2, 3, 4]], good[[0, 2, 3, 4]])


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    """Alone, among others of its slot, in another place of its tile, in another tile, and with other slots about."""
    site = site_slots(1040, 72, BFLOAT16)
    alone = Batch([(3, 1)], [site], BFLOAT16, "add")
    wanted = alone.run()
    assert_close(wanted, alone.truth())
    for entries, row in (([(3, 9)], 8), ([(3, 40)], 35), ([(1, 5), (None, 2), (3, 2), (7, 3), (3, 1)], 12)):
        batch = Batch(list(entries), [site], BFLOAT16, "add")
        batch.x.view[row], batch.base.view[row] = alone.x.view[0], alone.base.view[0]
        assert_same_bits(batch.run()[row], wanted[0])


def test_what_was_prepared_once_serves_every_batch() -> None:
    """Buffers, scratch and grid stay, as in a CUDA graph; what a batch leaves behind does not reach the next."""
    site = site_slots(1040, 40, BFLOAT16)
    batches = [Batch(entries, [site], BFLOAT16) for entries in (mixed(50), [(2, 1)], [(None, 3)], mixed(30, "zipf"))]
    plan, prepared = batches[0].prepare()
    x, out = batches[0].x.view, batches[0].out.view
    for batch in batches:
        x.copy_(batch.x.view)
        out.fill_(math.nan)
        for _ in range(2):
            load(plan, batch.slots)
            plan.execute()
            prepared.execute()
        batch.out.view.copy_(out)
        assert_close(batch.live_out(), batch.truth())
        assert_same_bits(batch.live_out(), Batch(batch.entries, [site], BFLOAT16).run())


def test_a_filled_slot_needs_no_new_launches() -> None:
    batch = Batch([(0, 2), (1, 1)], [site_slots(64, 40)], FLOAT32)
    plan, prepared = batch.prepare()
    part = prepared.call.parts[0]
    load(plan, batch.slots)
    plan.execute()
    part.ranks[0], part.scales[0] = 2, 8.0
    prepared.execute()
    site = batch.sites[0]
    batch.sites = [SiteSlots(site.a, site.b, (2, *site.ranks[1:]), (8.0, *site.scales[1:]))]
    assert_close(batch.live_out(), batch.truth())


def test_what_the_shrink_leaves_above_a_rank_is_zero() -> None:
    """It reads nothing of A there, and what the expand reads for its width is no garbage."""
    batch = Batch([(2, 1)], [site_slots(64, 40)], FLOAT32)  # rank 7 of 32
    plan, prepared = batch.prepare()
    load(plan, batch.slots)
    plan.execute()
    prepared.execute()
    assert (prepared.planes.view(-1, 32)[0, 7:16] == 0).all()
    assert prepared.planes.view(-1, 32)[0, 16:].isnan().all()


def test_inputs_and_slots_are_not_written() -> None:
    batch = Batch(mixed(8), [site_slots(64, 40)], FLOAT32, "add")
    tensors = (batch.x.buffer, batch.base.buffer, batch.sites[0].a, batch.sites[0].b)
    before = [tensor.clone() for tensor in tensors]
    batch.run()
    for tensor, copy in zip(tensors, before, strict=True):
        assert_same_bits(tensor, copy)
