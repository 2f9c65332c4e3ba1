"""Times ours against a peer in one run, turn by turn, and prints one JSON line per comparison.

A timing is never a pass or a fail: a record says what was measured, where, and the ratio peer / ours, which is above 1
where slotcar is faster.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

Call = Callable[[], object]

_WARM_UP = 3


class Took(NamedTuple):
    """Microseconds: on the wall's clock, and of this process's CPU time, which other processes disturb less."""

    wall: float
    cpu: float


class Times(list[Took]):
    """What each call of one side took."""

    @property
    def median(self) -> Took:
        return self._at(statistics.median)

    @property
    def p99(self) -> Took:
        return self._at(lambda values: sorted(values)[min(len(values) - 1, len(values) * 99 // 100)])

    def _at(self, choose: Callable[[list[float]], float]) -> Took:
        return Took(*(round(choose([took[clock] for took in self]), 1) for clock in range(2)))


def compare(bench: str, case: dict[str, Any], ours: Call, peer: Call, peer_name: str, runs: int) -> dict[str, Any]:
    """Calls `ours` and `peer` in turns, `runs` times each, and prints and returns the record."""
    mine, theirs = interleaved((ours, peer), runs)
    record = {
        "bench": bench,
        "case": case,
        "ours": "slotcar",
        "peer": peer_name,
        "unit": "us",
        "ours_median": mine.median.wall,
        "peer_median": theirs.median.wall,
        "ratio": round(theirs.median.wall / mine.median.wall, 2),
        "ours_p99": mine.p99.wall,
        "peer_p99": theirs.p99.wall,
        "ours_cpu_median": mine.median.cpu,
        "peer_cpu_median": theirs.median.cpu,
        "cpu_ratio": round(theirs.median.cpu / mine.median.cpu, 2),
        "runs": runs,
        "machine": machine(),
    }
    print(json.dumps(record), flush=True)
    return record


def interleaved(calls: Sequence[Call], runs: int) -> list[Times]:
    """Times `runs` calls of each; who goes first alternates, so that drift and caches favour nobody."""
    times = [Times() for _ in calls]
    for run in range(-_WARM_UP, runs):
        turn = list(enumerate(calls))
        for index, call in turn if run % 2 else reversed(turn):
            took = _time(call)
            if run >= 0:
                times[index].append(took)
    return times


def _time(call: Call) -> Took:
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    call()
    wall_took = time.perf_counter_ns() - wall
    return Took(wall_took / 1e3, (time.process_time_ns() - cpu) / 1e3)


def machine() -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
    }


def last_level_cache_bytes(default: int = 64 << 20) -> int:
    """Size of the largest cache of the first core, or `default` where the system does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=default)


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
