"""Times ours against its peers in one run, turn by turn, and prints one JSON line per comparison.

A line is a `Record`: `ratio` is peer / ours, above 1 where slotcar is the faster; `case` says what was computed, with
`"target": true` where the project has a target for the ratio. A timing is never a pass or a fail.

Each benchmark is a module that `python -m tests.bench` runs with `--smoke`, `--quick` or neither (sizes.py); targets.py
and charts.py know the fields of its cases.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

__all__ = [
    "Bench",
    "Peer",
    "Record",
    "Took",
    "compare",
    "interleaved",
    "last_level_cache_bytes",
    "machine",
    "records",
    "timed",
]

Bench = Literal["kernels", "planes", "step", "load", "beside", "hits", "mapping", "clients", "e2e"]
"""What is measured; also the name of the line's table and plot."""

Peer = Literal[
    "peft", "torch", "grpc-unary", "eventfd", "memcpy", "roof", "in-process", "base", "ten-adapters", "alone", "belady"
]
"""What ours is compared with: `roof` is to move all bytes once or a float32 matrix product, whichever is slower;
`ten-adapters` is ours where ten are registered, `alone` ours while nothing is loaded; `belady` knows the future."""

Call = Callable[[], object]

_WARM_UP = 3
_VECTOR_FLAGS = ("avx", "fma", "f16c", "amx")


class Took(NamedTuple):
    """Microseconds: on the wall's clock, and of this process's CPU time, which other processes disturb less."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Record:
    """One line: what was compared, the medians and 99th percentiles of both sides, and where."""

    bench: Bench
    case: Mapping[str, Any]
    ours: str
    peer: Peer
    unit: str
    ours_median: float
    peer_median: float
    ratio: float
    ours_p99: float
    peer_p99: float
    ours_cpu_median: float
    peer_cpu_median: float
    cpu_ratio: float
    runs: int
    machine: Mapping[str, Any] = field(default_factory=lambda: machine())  # noqa: PLW0108 - defined below

    @classmethod
    def of(
        cls, bench: Bench, case: Mapping[str, Any], ours: tuple[str, Sequence[Took]], peer: tuple[Peer, Sequence[Took]]
    ) -> Record:
        """The record of two sides that were timed already, each a name and what its calls took."""
        (our_name, mine), (peer_name, theirs) = ours, peer
        our_median, their_median = _at(statistics.median, mine), _at(statistics.median, theirs)
        our_p99, their_p99 = _at(_p99, mine), _at(_p99, theirs)
        return cls(
            bench=bench,
            case=case,
            ours=our_name,
            peer=peer_name,
            unit="us",
            ours_median=our_median.wall,
            peer_median=their_median.wall,
            ratio=_ratio(their_median.wall, our_median.wall),
            ours_p99=our_p99.wall,
            peer_p99=their_p99.wall,
            ours_cpu_median=our_median.cpu,
            peer_cpu_median=their_median.cpu,
            cpu_ratio=_ratio(their_median.cpu, our_median.cpu),
            runs=len(mine),
        )

    @classmethod
    def counted(
        cls,
        bench: Bench,
        case: Mapping[str, Any],
        ours: tuple[str, Sequence[float]],
        peer: tuple[Peer, Sequence[float]],
        unit: str,
    ) -> Record:
        """The record of two sides that were counted, not timed: the less the better; it has no CPU times."""
        sides = ([Took(round(count, 2), 0.0) for count in counts] for _, counts in (ours, peer))
        mine, theirs = ((name, took) for (name, _), took in zip((ours, peer), sides, strict=True))
        return replace(cls.of(bench, case, mine, theirs), unit=unit)  # type: ignore[arg-type]

    def printed(self) -> Record:
        """Itself, after its line went out."""
        print(json.dumps(asdict(self)), flush=True)
        return self


def compare(
    bench: Bench, case: Mapping[str, Any], ours: tuple[str, Call], peers: Mapping[Peer, Call], runs: int
) -> list[Record]:
    """Calls ours and all peers in turns, `runs` times each; prints and returns one record per peer."""
    return [record.printed() for record in records(bench, case, ours, peers, runs)]


def records(
    bench: Bench, case: Mapping[str, Any], ours: tuple[str, Call], peers: Mapping[Peer, Call], runs: int
) -> list[Record]:
    """As `compare`, without printing: for a case that needs figures of its own in what is printed."""
    name, call = ours
    mine, *theirs = interleaved((call, *peers.values()), runs)
    return [Record.of(bench, case, (name, mine), peer) for peer in zip(peers, theirs, strict=True)]


def interleaved(calls: Sequence[Call], runs: int, warm_up: int = _WARM_UP) -> list[list[Took]]:
    """What `runs` calls of each took; the order alternates, so that drift and caches favour nobody."""
    times: list[list[Took]] = [[] for _ in calls]
    for run in range(-warm_up, runs):
        turn = list(enumerate(calls))
        for index, call in turn if run % 2 else reversed(turn):
            took = timed(call)
            if run >= 0:
                times[index].append(took)
    return times


def machine() -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    return {
        "cpu": _of_cpu("model name"),
        "flags": " ".join(flag for flag in _of_cpu("flags").split() if flag.startswith(_VECTOR_FLAGS)),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def last_level_cache_bytes(default: int = 64 << 20) -> int:
    """Size of the largest cache of the first core, or `default` where the system does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=default)


def timed(call: Call) -> Took:
    """What one call takes."""
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    call()
    wall_took = time.perf_counter_ns() - wall
    return Took(wall_took / 1e3, (time.process_time_ns() - cpu) / 1e3)


def _at(choose: Callable[[Sequence[float]], float], times: Sequence[Took]) -> Took:
    return Took(*(round(choose([took[clock] for took in times]), 2) for clock in range(2)))


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


def _ratio(theirs: float, ours: float) -> float:
    return float(f"{theirs / ours:.3g}") if ours else 0.0


def _of_cpu(field: str) -> str:
    """What the system says of the first core."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "unknown")
