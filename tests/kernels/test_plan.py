"""The plan: each row exactly once, each slot in one segment, nothing inferred."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slotcar_kernels.plan import Plan, plan_rows

from tests.kernels.cases import Entries

ENTRIES = st.lists(st.tuples(st.none() | st.integers(0, 6), st.sampled_from([0, 0, 1, 1, 1, 2, 3, 40])), max_size=60)


def slots_by_row(plan: Plan) -> list[int | None]:
    """Per row the slot that the plan says, having checked that each row is said exactly once."""
    order = list(range(plan.rows)) if plan.order is None else plan.order.tolist()
    assert sorted(order) == list(range(plan.rows))
    found: dict[int, int | None] = {}
    for slot, start, stop in [*plan.segments, *((None, start, stop) for start, stop in plan.base_ranges)]:
        assert 0 <= start < stop <= plan.rows
        for row in order[start:stop]:
            assert row not in found, f"row {row} twice"
            found[row] = slot
    return [found[row] for row in range(plan.rows)]


@given(ENTRIES)
def test_each_row_has_the_slot_of_its_entry(entries: Entries) -> None:
    plan = plan_rows(entries)
    assert plan.rows == sum(count for _, count in entries)
    assert slots_by_row(plan) == [slot for slot, count in entries for _ in range(count)]


@given(ENTRIES)
def test_a_slot_has_one_segment(entries: Entries) -> None:
    slots = [segment.slot for segment in plan_rows(entries).segments]
    assert sorted(slots) == sorted({slot for slot, count in entries if slot is not None and count})


@given(ENTRIES)
def test_an_order_is_a_permutation_that_keeps_rows_of_a_slot_in_order_and_base_last(entries: Entries) -> None:
    plan = plan_rows(entries)
    if plan.order is None:
        assert plan.inverse is None
        return
    assert plan.order.dtype == torch.int64
    assert plan.inverse is not None
    assert torch.equal(plan.order[plan.inverse], torch.arange(plan.rows))
    assert [segment.slot for segment in plan.segments] == sorted(segment.slot for segment in plan.segments)
    for start, stop in [*((start, stop) for _, start, stop in plan.segments), *plan.base_ranges]:
        assert plan.order[start:stop].diff().gt(0).all()
    assert plan.base_ranges in ((), ((plan.adapter_rows, plan.rows),))


@given(ENTRIES)
def test_rows_move_only_when_a_slot_is_split(entries: Entries) -> None:
    slots = [slot for slot, count in entries for _ in range(count)]
    runs = [slot for row, slot in enumerate(slots) if slot is not None and (row == 0 or slots[row - 1] != slot)]
    assert (plan_rows(entries).order is None) == (len(runs) == len(set(runs)))


@given(ENTRIES)
def test_adapter_rows_are_those_with_a_slot(entries: Entries) -> None:
    assert plan_rows(entries).adapter_rows == sum(count for slot, count in entries if slot is not None)


def test_the_pictures_in_the_docstring() -> None:
    stay = plan_rows([(7, 2), (None, 1), (3, 1)])
    assert (stay.segments, stay.base_ranges, stay.order) == (((7, 0, 2), (3, 3, 4)), ((2, 3),), None)
    move = plan_rows([(7, 2), (None, 1), (3, 1), (7, 1)])
    assert move.order is not None
    assert move.inverse is not None
    assert move.order.tolist() == [3, 0, 1, 4, 2]
    assert move.inverse.tolist() == [1, 2, 4, 0, 3]
    assert (move.segments, move.base_ranges) == (((3, 0, 1), (7, 1, 4)), ((4, 5),))


@pytest.mark.parametrize("entries", [[], [(0, 0)], [(None, 0), (1, 0)]])
def test_no_rows(entries: Entries) -> None:
    plan = plan_rows(entries)
    assert (plan.rows, plan.segments, plan.base_ranges, plan.order) == (0, (), (), None)


def test_base_rows_alone_need_no_order() -> None:
    plan = plan_rows([(None, 3), (5, 0), (None, 4)])
    assert (plan.segments, plan.base_ranges, plan.order) == ((), ((0, 7),), None)


@pytest.mark.parametrize("entry", [(0, -1), (None, -1), (-1, 1), (-1, 0), (1 << 62, 1)])
def test_an_impossible_entry_is_refused(entry: tuple[int | None, int]) -> None:
    with pytest.raises(ValueError, match="negative count or an impossible slot"):
        plan_rows([(0, 2), entry])
