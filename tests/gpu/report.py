"""What the measured times say: medians, floors, targets, and the table of them. No timing here is a pass or a fail.

weights    adapters · rank · (in + out) elements: what a site's batch must read of its slots
floor      all bytes that it must move, over what a copy moves in a second on this machine
target     up to 2 MB of weights 5 µs; up to 60 MB the floor and 5 µs; above 1.3 times the floor
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CASES", "Case", "Result", "floor_us", "median_us", "table", "target_us"]

ITEM_BYTES = 2  # bfloat16
HIDDEN = 4096
SMALL_BYTES, LARGE_BYTES = 2e6, 60e6
PAIR_US, LARGE_RATIO = 5.0, 1.3
OVER_ATOMICS = 1.3
MICRO = 1e6


@dataclass(frozen=True)
class Case:
    """A decode step's rows, spread evenly over the adapters, at one site of HIDDEN → HIDDEN."""

    tokens: int
    adapters: int
    rank: int
    hidden: int = HIDDEN

    @property
    def name(self) -> str:
        return f"{self.tokens}/{self.adapters}, rank {self.rank}"

    @property
    def weight_bytes(self) -> int:
        return self.adapters * self.rank * 2 * self.hidden * ITEM_BYTES

    @property
    def moved_bytes(self) -> int:
        """Weights and x once, and the output once each way, because the delta is added to what is there."""
        return self.weight_bytes + 3 * self.tokens * self.hidden * ITEM_BYTES


CASES = tuple(
    Case(tokens, adapters, rank) for tokens, adapters in ((1, 1), (32, 8), (64, 64), (256, 64)) for rank in (16, 64)
)


@dataclass(frozen=True)
class Result:
    """Microseconds of one shrink and expand, by side; `errors` are the reasons of sides that could not be measured."""

    case: Case
    pairs: int
    us: Mapping[str, float]
    empty_us: float
    copy_bytes_per_second: float
    errors: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        floor = floor_us(self.case, self.copy_bytes_per_second)
        return {
            "case": {
                **vars(self.case),
                "dtype": "bfloat16",
                "mode": "in place",
                "weight_bytes": self.case.weight_bytes,
            },
            "pairs_per_replay": self.pairs,
            "us": dict(self.us),
            "empty_pair_us": self.empty_us,
            "copy_bytes_per_second": self.copy_bytes_per_second,
            "floor_us": floor,
            "target_us": target_us(self.case, floor),
            "errors": dict(self.errors),
        }


def median_us(seconds: Sequence[float], pairs: int) -> float:
    """The median of the replays, for one of the pairs that each has."""
    return statistics.median(seconds) / pairs * MICRO


def floor_us(case: Case, copy_bytes_per_second: float) -> float:
    return case.moved_bytes / copy_bytes_per_second * MICRO


def target_us(case: Case, floor: float) -> float:
    """The most that a pair is to take."""
    if case.weight_bytes < SMALL_BYTES:
        return PAIR_US
    return floor + PAIR_US if case.weight_bytes <= LARGE_BYTES else LARGE_RATIO * floor


def table(
    facts: Mapping[str, object], parts: Sequence[Mapping[str, object]], results: Sequence[Mapping[str, Any]]
) -> str:
    """The page gpu.md."""
    return "\n".join([*_head(facts), *_parts(parts), *_times(results), ""])


def _head(facts: Mapping[str, object]) -> Iterator[str]:
    yield "# Measurements on a GPU\n"
    yield "`tests/gpu/run.sh` makes this page and `gpu.json`. No timing is a pass or a fail.\n"
    yield from ("| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items()), "")


def _parts(parts: Sequence[Mapping[str, object]]) -> Iterator[str]:
    yield "## What ran\n"
    yield from ("| part | result | seconds | |", "|---|---|---|---|")
    for part in parts:
        yield f"| {part['name']} | {part['result']} | {part['seconds']:.0f} | {_cell(part['why'])} |"
    yield ""


def _times(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## A shrink and an expand at one site\n"
    if not results:
        yield "Nothing was measured."
        return
    yield (
        "Hidden 4096 → 4096, bfloat16, added in place. Microseconds, medians of replays of a CUDA graph whose pairs "
        "use different slots, more than 120 MB together. The floor is all bytes over the bandwidth of a copy; `empty` "
        "is a pair of graph nodes that do nothing. `torch` is a loop over the adapters, `atomics` a split-K baseline "
        "in the style of common engines, with the fastest of its settings. `plan`, slotcar's index work, is once a "
        "step, and in no other column.\n"
    )
    columns = ("tokens/adapters", "rank", "weights", "floor", "empty", "plan", "slotcar", "target", "")
    columns += ("torch", "atomics", "atomics/slotcar", "")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    yield from map(_line, results)


def _line(result: Mapping[str, Any]) -> str:
    case, us = result["case"], result["us"]
    ours, atomics = us.get("slotcar"), us.get("atomics")
    ratio = None if ours is None or atomics is None else atomics / ours
    cells = [
        f"{case['tokens']}/{case['adapters']}",
        f"{case['rank']}",
        f"{case['weight_bytes'] / 1e6:.1f} MB",
        _number(result["floor_us"]),
        _number(result["empty_pair_us"]),
        _number(us.get("plan")),
        _number(ours),
        f"≤ {_number(result['target_us'])}",
        _met(None if ours is None else ours <= result["target_us"]),
        _number(us.get("torch")),
        _number(atomics),
        "–" if ratio is None else f"{ratio:.2f} ×",
        _met(None if ratio is None else ratio >= OVER_ATOMICS),
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _met(is_met: bool | None) -> str:
    return {True: "met", False: "missed", None: "not measured"}[is_met]


def _cell(value: object) -> str:
    """On one line of a table."""
    return " ".join(str(value).replace("|", "\\|").split())
