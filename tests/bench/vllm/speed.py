"""Times the steps of several engines in turns, and says what LoRA costs each of them."""

from __future__ import annotations

import contextlib
import operator
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.harness import machine
from tests.bench.vllm.engine import Engine, Turn
from tests.bench.vllm.process import EngineProcess, Side, serving

__all__ = ["Group", "speeds"]

_WARM_UP_STEPS = 3
_STARTED_TOGETHER = 2


@dataclass(frozen=True)
class Group:
    """Sides that are compared; the first of them is the base model."""

    threads: int
    sides: tuple[Side, ...]

    @classmethod
    def of(cls, threads: int, counts: Sequence[int]) -> Group:
        """All sides, for these numbers of adapters."""
        sides = [
            side
            for count in counts
            for side in (Side.own(count), Side.slotcar("direct", count), Side.slotcar("ring", count))
        ]
        return cls(threads, (Side.base(), *sides))


def speeds(settings: Engine, group: Group, steps: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A line for each side of the group."""
    with contextlib.ExitStack() as stack:
        sidecar = stack.enter_context(serving(settings))
        engines: list[EngineProcess] = []
        for side in group.sides:
            if len(engines) >= _STARTED_TOGETHER:
                engines[-_STARTED_TOGETHER].ready()
            engines.append(stack.enter_context(EngineProcess(settings, side, sidecar, group.threads)))
        for engine in engines[-_STARTED_TOGETHER:]:
            engine.ready()
        turns = _in_turns(engines, steps, rounds)
    for side in group.sides:
        own = Side.own(side.adapters) if side.adapters else None
        yield {
            "bench": "vllm",
            "case": _case(settings, group, side),
            **_figures(turns[side], turns[group.sides[0]], turns[own] if own else None, settings.rows),
            "machine": machine() | {"threads": group.threads},
        }


def _in_turns(engines: Sequence[EngineProcess], steps: int, rounds: int) -> dict[Side, list[Turn]]:
    """What each engine did in its turns; the order alternates."""
    turns: dict[Side, list[Turn]] = {engine.side: [] for engine in engines}
    for engine in engines:
        engine.turn(_WARM_UP_STEPS)
    for number in range(rounds):
        for engine in engines if number % 2 else reversed(engines):
            turns[engine.side].append(engine.turn(steps))
    return turns


def _case(settings: Engine, group: Group, side: Side) -> dict[str, Any]:
    return {
        "side": side.name,
        "adapters": side.adapters,
        "threads": group.threads,
        "rows": settings.rows,
        "rank": settings.rank,
        "model": settings.model.rpartition("/")[2],
    }


def _figures(mine: Sequence[Turn], base: Sequence[Turn], own: Sequence[Turn] | None, rows: int) -> dict[str, Any]:
    steps = sorted(step for turn in mine for step in turn.took)
    step = statistics.median(steps)
    figures: dict[str, Any] = {
        "ms_per_step": _ms(step),
        "p99_ms": _ms(steps[min(len(steps) - 1, len(steps) * 99 // 100)]),
        "cpu_ms_per_step": _ms(_cpu(mine)),
        "tokens_per_s": round(rows * 1e9 / step, 1),
        "runs": len(steps),
    }
    if own is not None:
        figures["lora_ms"], figures["lora_cpu_ms"] = _ms(_over(mine, base)), _ms(_cpu(mine) - _cpu(base))
        figures["own_lora_ms"] = _ms(_over(own, base))
        figures["tokens_as_own"], figures["tokens_as_base"] = (round(_alike(mine, other), 4) for other in (own, base))
    return figures


def _over(mine: Sequence[Turn], base: Sequence[Turn]) -> float:
    """By how much a step is longer than the base model's in the same round."""
    pairs = zip(mine, base, strict=True)
    return statistics.median(statistics.median(turn.took) - statistics.median(other.took) for turn, other in pairs)


def _cpu(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.cpu / len(turn.took) for turn in turns)


def _alike(mine: Sequence[Turn], others: Sequence[Turn]) -> float:
    """The part of the tokens that are the other side's: after one that differs, the rest of a row may."""
    found, wanted = ([token for row in turns[0].tokens for token in row] for turns in (mine, others))
    return sum(map(operator.eq, found, wanted)) / len(wanted)


def _ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 2)
