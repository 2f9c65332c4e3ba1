"""Embeddings and experts in Triton's interpreter against float64, and numbers of theirs that there are not."""

from __future__ import annotations

import math

import pytest
import torch
from slotcar_kernels.reference import lora_rows
from slotcar_kernels.sites import SiteSlots

from tests.kernels.cases import SLOTS, Entries, entries_of, site_slots
from tests.kernels.triton.interpreted.batch import GARBAGE, ODD_GAP, Batch, load
from tests.tolerances import assert_close, assert_same_bits

full = pytest.mark.full
FLOAT32, FLOAT16, BFLOAT16 = DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ENTRIES = entries_of("uniform", 30, base=0.2)
TOKENS, EXPERTS = 11, 3
PREFILL = 513


def aux_of(count: int, rows: int, bucket: int) -> torch.Tensor:
    """int32 [bucket, 1]; every number is there, and garbage behind the live rows."""
    aux = torch.full((bucket, 1), GARBAGE, dtype=torch.int32)
    numbers = torch.arange(rows) % count
    aux[:rows, 0] = numbers[torch.randperm(rows, generator=torch.Generator().manual_seed(5))]
    return aux


def embedding(width: int, dtype: torch.dtype) -> SiteSlots:
    site = site_slots(TOKENS, width, dtype)
    return SiteSlots(site.a.transpose(1, 2).contiguous(), site.b, site.ranks, site.scales, embedding=True)


def embedding_batch(dtype: torch.dtype, slot_dtype: torch.dtype, mode: str, bucket: int = 64, gap: int = 8) -> Batch:
    batch = Batch(ENTRIES, [embedding(37 if gap == ODD_GAP else 40, slot_dtype)], dtype, mode, bucket, gap)
    batch.aux = aux_of(TOKENS, batch.rows, bucket)
    return batch


def expert_slots(dtype: torch.dtype, width: int = 40) -> SiteSlots:
    """Each slot and expert has a rank of its own; slots are further apart than their experts."""
    ranks = [(7 * index) % 18 for index in range(SLOTS * EXPERTS - 1)]
    flat = site_slots(72, width, dtype, ranks=ranks)

    def spread(values: torch.Tensor) -> torch.Tensor:
        wide = torch.full((SLOTS, EXPERTS + 2, *values.shape[1:]), math.nan, dtype=dtype)
        wide[:, 1 : EXPERTS + 1] = values.view(SLOTS, EXPERTS, *values.shape[1:])
        return wide[:, 1 : EXPERTS + 1]

    return SiteSlots(spread(flat.a), spread(flat.b), (*ranks, 0), flat.scales)


def expert_batch(dtype: torch.dtype, mode: str, bucket: int = 64, width: int = 40) -> Batch:
    batch = Batch(ENTRIES, [expert_slots(dtype, width)], dtype, mode, bucket)
    batch.aux = aux_of(EXPERTS, batch.rows, bucket)
    return batch


def expert_truth(batch: Batch) -> torch.Tensor:
    assert batch.aux is not None
    numbers = batch.aux[: batch.rows, 0].tolist()
    keys: Entries = [
        (None if slot < 0 else slot * EXPERTS + expert, 1) for slot, expert in zip(batch.slots, numbers, strict=True)
    ]
    base = None if batch.mode == "delta" else batch.base.view[: batch.rows]
    return lora_rows(keys, batch.x.view[: batch.rows], batch.sites[0], base)


@pytest.mark.parametrize("slot_dtype", [BFLOAT16, pytest.param(FLOAT32, marks=full), pytest.param(FLOAT16, marks=full)])
@pytest.mark.parametrize("dtype", [BFLOAT16, pytest.param(FLOAT32, marks=full), pytest.param(FLOAT16, marks=full)])
@pytest.mark.parametrize("mode", ["delta", "in place", pytest.param("add", marks=full)])
def test_embeddings(mode: str, dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    embedding_batch(dtype, slot_dtype, mode).check()


@full
@pytest.mark.parametrize("bucket", [64, PREFILL])
@pytest.mark.parametrize("gap", [8, ODD_GAP])
def test_embeddings_of_other_shapes(bucket: int, gap: int) -> None:
    embedding_batch(BFLOAT16, BFLOAT16, "add", bucket, gap).check()


@pytest.mark.parametrize("dtype", [BFLOAT16, pytest.param(FLOAT32, marks=full), pytest.param(FLOAT16, marks=full)])
@pytest.mark.parametrize("mode", ["delta", pytest.param("in place", marks=full), pytest.param("add", marks=full)])
@pytest.mark.parametrize(("bucket", "width"), [(64, 40), pytest.param(PREFILL, 33, marks=full)])
def test_experts(bucket: int, width: int, mode: str, dtype: torch.dtype) -> None:
    batch = expert_batch(dtype, mode, bucket, width)
    found = batch.run()
    assert_close(found, expert_truth(batch))
    of_base = torch.tensor([slot < 0 for slot in batch.slots])
    wanted = torch.zeros_like(found) if mode == "delta" else batch.base.view[: batch.rows]
    assert_same_bits(found[of_base], wanted[of_base])


@pytest.mark.parametrize("wrong", [-1, TOKENS, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("kind", ["embedding", "experts"])
def test_a_number_that_there_is_not_is_a_fault_and_nothing_is_written(kind: str, wrong: int) -> None:
    batch = expert_batch(BFLOAT16, "delta") if kind == "experts" else embedding_batch(BFLOAT16, BFLOAT16, "delta")
    assert batch.aux is not None
    batch.aux[batch.slots.index(-1)] = wrong  # of a row of BASE, which has no use for it
    plan, site = batch.prepare()
    load(plan, batch.slots)
    plan.execute()
    site.execute()
    assert site.plan.faults.sum() == 1
    assert not plan.faults.any()
    assert batch.out.buffer.isnan().all()


def test_an_id_that_changes_after_its_check_reads_nothing() -> None:
    """Whoever shares aux cannot make a kernel read outside of A: the row has no delta then."""
    batch = embedding_batch(BFLOAT16, BFLOAT16, "delta")
    assert batch.aux is not None
    plan, site = batch.prepare()
    load(plan, batch.slots)
    site.plan.execute()
    row = next(row for row, slot in enumerate(batch.slots) if slot >= 0)
    before = batch.aux[row].clone()
    arguments, constants = site.expand_launch
    batch.aux[row] = 1 << 30
    from slotcar_kernels.triton.expand import expand

    expand[(2,)](*arguments, **constants)
    batch.aux[row] = before
    wanted = batch.truth()
    wanted[row] = 0
    assert_close(batch.live_out(), wanted)


def test_aux_is_read_when_the_kernels_run() -> None:
    batch = embedding_batch(FLOAT32, FLOAT32, "delta")
    assert batch.aux is not None
    plan, site = batch.prepare()
    load(plan, batch.slots)
    for _ in range(2):
        batch.aux[: batch.rows] = batch.aux[: batch.rows].flip(0)
        plan.execute()
        site.execute()
        assert_close(batch.live_out(), batch.truth())
