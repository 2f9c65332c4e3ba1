"""What the traces of requests are made of, and that the peer of every policy is the best that there can be."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from functools import lru_cache
from pathlib import Path

import pytest
from slotcar_sidecar.core.policy import Eviction

from tests.bench.hits import belady, in_bytes, in_slots
from tests.bench.trace import RECORDED, SYNTHETIC, Trace, read_trace, synthetic, write_trace


def small(seed: int, length: int = 12, adapters: int = 5) -> Trace:
    chosen = random.Random(seed)
    return Trace.of("small", [*(chosen.randrange(adapters) for _ in range(length)), adapters - 1], seed)


def most_hits(requests: tuple[int, ...], slots: int) -> int:
    """By trying every choice."""

    @lru_cache(None)
    def best(at: int, there: frozenset[int]) -> int:
        if at == len(requests):
            return 0
        if requests[at] in there:
            return 1 + best(at + 1, there)
        if len(there) < slots:
            return best(at + 1, there | {requests[at]})
        return max(best(at + 1, there - {gone} | {requests[at]}) for gone in there)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_choice_is_better_than_the_peer(seed: int, slots: int) -> None:
    trace = small(seed)
    found = sum(belady(trace, slots, [1] * len(trace.mib)).hits)
    assert found == most_hits(tuple(trace.requests), slots)
    for eviction in Eviction:
        assert sum(in_slots(trace, slots, eviction).hits) <= found


@pytest.mark.parametrize("name", SYNTHETIC)
def test_lru_is_lru(name: str) -> None:
    """By slots and, where all have one size, by bytes too."""
    trace = synthetic(name, 1, adapters=60, length=2000)
    there: OrderedDict[int, None] = OrderedDict()
    wanted = []
    for number in trace.requests:
        wanted.append(number in there)
        there[number] = None
        there.move_to_end(number)
        if len(there) > 8:
            there.popitem(last=False)
    assert list(in_slots(trace, 8, Eviction.LRU).hits) == wanted
    equal = Trace(trace.name, trace.requests, [1] * len(trace.mib), trace.seconds)
    assert list(in_bytes(equal, 8).hits) == wanted


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_seed_makes_one_trace(name: str) -> None:
    one, same, other = (synthetic(name, seed, adapters=100, length=3000) for seed in (1, 1, 2))
    assert one == same != other
    assert len(one.requests) == 3000
    assert set(one.requests) <= set(range(100))
    most, *_ = Counter(one.requests).most_common(1)
    assert most[1] > 3000 / 100, "some are more popular than others"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    numbers = [random.Random(0).randrange(1000) for _ in range(100)]
    write_trace(tmp_path / "trace.txt", "numbers", numbers)
    assert list(read_trace(tmp_path / "trace.txt").requests) == numbers


def test_the_recorded_trace_is_one() -> None:
    trace = read_trace(RECORDED)
    assert len(trace.requests) > 1000
    assert len(set(trace.requests)) > 100
    assert RECORDED.stat().st_size < 50_000
