"""The plan that the device makes, against one that Python makes: the same rows in the same tiles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from slotcar_kernels.triton import BatchPlan
from slotcar_kernels.triton.tiles import rows_for

from tests.kernels.cases import POPULARITIES, SLOTS, entries_of
from tests.kernels.triton.interpreted.batch import CPU, GARBAGE, load, slots_by_row

full = pytest.mark.full
BUCKETS = (64, 70, 513)
EXPERTS = 3


def garbage_plan(bucket: int, plan: BatchPlan | None = None) -> BatchPlan:
    plan = plan or BatchPlan.of_bucket(bucket, SLOTS, CPU)
    for buffer in (plan.keys, plan.order, plan.segments, plan.tiles, plan.counts, plan.faults):
        buffer.fill_(GARBAGE)
    return plan


def wanted(keys: Sequence[int], bucket: int) -> tuple[list[int], list[list[int]], list[int]]:
    """order, tiles and counts; a key below 0 is BASE's."""
    of_base = 2**40
    order = sorted(range(len(keys)), key=lambda row: (keys[row] if keys[row] >= 0 else of_base, row))
    tiles, start = [], 0
    for key, rows in itertools.groupby(order, key=lambda row: max(keys[row], -1)):
        left = len(list(rows))
        while left:
            length = min(left, rows_for(bucket))
            tiles.append([key, start, length])
            start, left = start + length, left - length
    return order, tiles, [sum(key >= 0 for key, _, _ in tiles), len(tiles)]


def assert_plan(plan: BatchPlan, keys: Sequence[int]) -> None:
    order, tiles, counts = wanted(keys, plan.bucket)
    assert plan.counts.tolist() == counts
    assert plan.order[: len(keys)].tolist() == order
    assert plan.tiles[: len(tiles), :3].tolist() == tiles
    assert len(tiles) <= plan.max_tiles
    assert not plan.faults.any()


@pytest.mark.parametrize("bucket", [BUCKETS[1], pytest.param(BUCKETS[0], marks=full), pytest.param(513, marks=full)])
@pytest.mark.parametrize("popularity", ["zipf", *(pytest.param(name, marks=full) for name in POPULARITIES)])
def test_rows_are_in_tiles_of_their_slots(popularity: str, bucket: int) -> None:
    slots = slots_by_row(entries_of(popularity, bucket, base=0.2))
    plan = garbage_plan(bucket)
    for count in (bucket, 1, 0, bucket - 3):
        load(plan, slots[:count])
        plan.execute()
        assert_plan(plan, slots[:count])


def test_experts_are_keys_of_their_own() -> None:
    slots = slots_by_row(entries_of("uniform", 40, base=0.2))
    experts = [(5 * row) % EXPERTS for row in range(len(slots))]
    aux = torch.full((64, 1), GARBAGE, dtype=torch.int32)
    aux[: len(slots), 0] = torch.tensor(experts)
    plan = BatchPlan.of_bucket(64, SLOTS, CPU)
    routed = garbage_plan(64, plan.routed(aux, EXPERTS, EXPERTS))
    load(plan, slots)
    routed.execute()
    keys = [-1 if slot < 0 else slot * EXPERTS + expert for slot, expert in zip(slots, experts, strict=True)]
    assert_plan(routed, keys)


@pytest.mark.parametrize("wrong", [-2, SLOTS, GARBAGE, -(2**31)])
def test_a_slot_that_there_is_not_leaves_nothing_to_do(wrong: int) -> None:
    """The host refuses it; whatever else has written it into the buffer gets no result."""
    plan = garbage_plan(70)
    load(plan, [0] * 68)
    plan.slots[66] = wrong
    plan.execute()
    assert plan.counts.tolist() == [0, 0]
    assert plan.faults.tolist() == [0, 1]


@pytest.mark.parametrize("slots", [[0] * 65, [SLOTS], [-2], [0, 1 << 40]], ids=["rows", "slot", "negative", "large"])
def test_the_host_refuses_before_anything_is_written(slots: list[int]) -> None:
    plan = BatchPlan.of_bucket(64, SLOTS, CPU)
    plan.write([3, -1])
    with pytest.raises(ValueError, match="wanted"):
        plan.write(slots)
    assert plan.rows.item() == 2
    assert plan.slots[:3].tolist() == [3, -1, -1]


def test_a_staging_buffer_is_what_is_copied() -> None:
    plan, staging = BatchPlan.of_bucket(64, SLOTS, CPU), torch.full((65,), GARBAGE, dtype=torch.int32)
    plan.write([3, -1, 2], staging)
    assert staging[:5].tolist() == [3, 3, -1, 2, -1]
    assert plan.slots[:4].tolist() == [3, -1, 2, -1]


@pytest.mark.parametrize(("bucket", "slots"), [(0, 1), (-1, 1), (8, 0)])
def test_a_bucket_without_rows_or_slots_is_refused(bucket: int, slots: int) -> None:
    with pytest.raises(ValueError, match="wanted at least one"):
        BatchPlan.of_bucket(bucket, slots, CPU)
