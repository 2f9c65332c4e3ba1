"""Times calls whose work is spread over processes: each by the wall's clock, with its share of the CPU time of all."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tests.bench.harness import Call, Took

__all__ = ["Side", "Turn", "cpu_nanoseconds", "in_turns", "repeated", "took"]

Side: TypeAlias = Callable[[int], list[Took]]
"""Makes that many calls and says what each took."""


class Turn(NamedTuple):
    """A side, and how many calls of it are made in one turn."""

    side: Side
    calls: int


def in_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[Took]]:
    """What the calls of each side took in `rounds` rounds, after one that warms up; the order alternates.

    Several calls are one turn, so that what a side leaves in the caches is its own.
    """
    times: dict[str, list[Took]] = {name: [] for name in turns}
    for number in range(-1, rounds):
        for name in list(turns) if number % 2 else list(turns)[::-1]:
            result = turns[name].side(turns[name].calls)
            if number >= 0:
                times[name] += result
    return times


def repeated(call: Call, pids: Sequence[int] = ()) -> Side:
    """A side of this process, whose calls make the processes `pids` work."""

    def side(calls: int) -> list[Took]:
        walls, clock = [], time.perf_counter_ns
        cpu = cpu_nanoseconds(os.getpid(), *pids)
        for _ in range(calls):
            start = clock()
            call()
            walls.append(clock() - start)
        return took(walls, cpu_nanoseconds(os.getpid(), *pids) - cpu)

    return side


def took(wall_nanoseconds: Iterable[int], cpu_nanoseconds: int) -> list[Took]:
    """Calls with their wall times, each with the same share of the CPU time of them all."""
    walls = list(wall_nanoseconds)
    return [Took(wall / 1e3, cpu_nanoseconds / len(walls) / 1e3) for wall in walls]


def cpu_nanoseconds(*pids: int) -> int:
    """The CPU time that all threads of the processes have had so far."""
    return sum(time.clock_gettime_ns(_cpu_clock(pid)) for pid in pids)


def _cpu_clock(pid: int) -> int:
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock))
    if error:
        raise OSError(error, os.strerror(error), f"the CPU clock of process {pid}")
    return clock.value
