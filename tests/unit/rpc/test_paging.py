"""Pages of one snapshot."""

from __future__ import annotations

import itertools

import pytest
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.rpc.paging import Pager

from tests.fakes.parts import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pager(clock: Clock) -> Pager[int]:
    numbers = itertools.count()
    return Pager(clock, lambda: f"id{next(numbers)}")


def test_the_pages_are_the_snapshot(pager: Pager[int]) -> None:
    first = pager.first(tuple(range(7)), "extra", 3)
    second = pager.next(first.next_token, 3)
    third = pager.next(second.next_token, 3)
    assert [first.items, second.items, third.items] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert third.next_token == ""
    assert third.extra == "extra"
    assert pager.next(first.next_token, 2).items == (3, 4)


def test_an_empty_list_is_one_page(pager: Pager[int]) -> None:
    assert pager.first((), None, 0).next_token == ""


def test_sizes_are_bounded(pager: Pager[int]) -> None:
    many = tuple(range(5000))
    assert len(pager.first(many, None, 0).items) == 100
    assert len(pager.first(many, None, 1 << 30).items) == 1000


@pytest.mark.parametrize("offset", ["", "x", "-1", "9" * 5000, "١", "1:1"])
def test_a_token_that_is_none_is_refused(pager: Pager[int], offset: str) -> None:
    name = pager.first(tuple(range(9)), None, 3).next_token.partition(":")[0]
    for token in (f"{name}:{offset}", f"other:{offset}", offset):
        with pytest.raises(RequestInvalid) as refusal:
            pager.next(token, 3)
        assert refusal.value.field == "page_token"


def test_a_token_is_good_for_a_minute(pager: Pager[int], clock: Clock) -> None:
    token = pager.first(tuple(range(9)), None, 3).next_token
    clock.now += 60
    pager.next(token, 3)
    clock.now += 0.1
    with pytest.raises(RequestInvalid):
        pager.next(token, 3)


def test_snapshots_do_not_pile_up(pager: Pager[int]) -> None:
    tokens = [pager.first(tuple(range(9)), None, 3).next_token for _ in range(65)]
    with pytest.raises(RequestInvalid):
        pager.next(tokens[0], 3)
    pager.next(tokens[1], 3)


def test_snapshots_whose_minute_is_over_are_dropped(pager: Pager[int], clock: Clock) -> None:
    for _ in range(9):
        pager.first(tuple(range(9)), None, 3)
    clock.now += 61
    pager.first(tuple(range(9)), None, 3)
    assert len(pager._snapshots) == 1
