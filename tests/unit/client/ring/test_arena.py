"""Blocks of an arena, against what they must be at any time."""

from __future__ import annotations

import random

from slotcar.shm.region import ALIGNMENT
from slotcar_client.transports.arena import Arena, aligned


def test_a_tensor_takes_whole_lines_and_at_least_one() -> None:
    assert [aligned(size) for size in (0, 1, 64, 65)] == [ALIGNMENT, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]


def test_blocks_are_at_the_lowest_place_that_has_room() -> None:
    arena = Arena(100)
    first, second, third = arena.take(30), arena.take(30), arena.take(40)
    assert (first, second, third) == ((0, 30), (30, 60), (60, 100))
    assert arena.take(1) is None
    assert second is not None
    arena.give_back(second)
    assert arena.take(31) is None
    assert arena.take(20) == (30, 50)
    assert arena.take(10) == (50, 60)


def test_no_two_blocks_overlap_and_none_is_refused_that_fits() -> None:
    chance = random.Random(7)
    arena, taken = Arena(1000), [(0, 0)][:0]
    for _ in range(5000):
        if taken and chance.random() < 0.5:
            arena.give_back(taken.pop(chance.randrange(len(taken))))
            continue
        size = chance.randint(1, 300)
        edges = [0, *sorted(end for _, end in taken)]
        room = [start for start in edges if not any(a < start + size and start < b for a, b in taken)]
        fitting = [start for start in room if start + size <= 1000]
        block = arena.take(size)
        assert block == ((min(fitting), min(fitting) + size) if fitting else None)
        if block is not None:
            taken.append(block)
