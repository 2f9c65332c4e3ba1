"""Measures the memory that adapters take of one, two and three engines, each with its own or all with one sidecar."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.bench.harness import machine
from tests.bench.vllm.engine import Engine
from tests.bench.vllm.process import EngineProcess, Side, memory_bytes, serving

__all__ = ["memories"]

_STEPS = 2


def memories(settings: Engine, engines: int) -> Iterator[dict[str, Any]]:
    """A line for each number of engines, from one to `engines`, with vLLM's own LoRA and with slotcar."""
    adapters, settings = len(settings.adapters), replace(settings, settles=True)
    bases = [total for _, total in _totals(settings, Side.base(), engines)]
    for side in (Side.own(adapters), Side.slotcar("direct", adapters)):
        before = 0
        for count, (sidecar, total) in enumerate(_totals(settings, side, engines), 1):
            base = bases[count - 1]
            over = total - base + (sidecar if side.plane else 0)
            yield {
                "bench": "vllm-memory",
                "case": {"side": side.name, "engines": count, "adapters": adapters, "rank": settings.rank},
                "engine_mib": _mib(base / count),
                "adapters_mib": _mib(over),
                "sidecar_mib": _mib(sidecar) if side.plane else 0,
                "last_engine_mib": _mib(over - before),
                "machine": machine() | {"threads": 1},
            }
            before = over


def _totals(settings: Engine, side: Side, engines: int) -> Iterator[tuple[int, int]]:
    """The bytes of the sidecar and of all engines together, after each engine that started and used its adapters."""
    with contextlib.ExitStack() as stack:
        sidecar = stack.enter_context(serving(settings))
        assert sidecar.process is not None
        pids = []
        for _ in range(engines):
            engine = stack.enter_context(EngineProcess(settings, side, sidecar, threads=1)).ready()
            engine.turn(_STEPS)
            pids.append(engine.pid)
            yield memory_bytes(sidecar.process.pid), sum(map(memory_bytes, pids))


def _mib(count: float) -> int:
    return round(count / (1 << 20))
