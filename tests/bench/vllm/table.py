"""Makes docs/measurements/vllm.md from the lines of `make bench-vllm`, with what was wanted of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["page"]

Line: TypeAlias = Mapping[str, Any]

_SPEED = (
    "threads",
    "adapters",
    "side",
    "ms a step",
    "p99",
    "CPU",
    "tokens/s",
    "LoRA",
    "its CPU",
    "vLLM's / its",
    "runs",
)
_MEMORY = ("side", "engines", "adapters take", "of that the sidecar", "the last engine added")
_LESS = 3.0
_HEAD = """`make bench-vllm` measures this and makes the page. A machine that does something else meanwhile gives other
numbers."""


def page(lines: Sequence[Line]) -> str:
    """The whole page."""
    speeds = [line for line in lines if line["bench"] == "vllm"]
    memories = [line for line in lines if line["bench"] == "vllm-memory"]
    what = ast.get_docstring(ast.parse(Path(__file__).with_name("__init__.py").read_text(encoding="utf-8"))) or ""
    title, _, text = what.partition("\n\n")
    sections = [
        f"# {title.rstrip('.')}",
        _HEAD,
        text,
        f"## The machine\n\n{_machine(lines)}",
        f"## Targets\n\n{_targets(speeds, memories)}",
        f"## Speed\n\n{_of_speeds(speeds)}",
        f"## Memory\n\n{_of_memories(memories)}",
    ]
    return "\n\n".join(sections) + "\n"


def _machine(lines: Sequence[Line]) -> str:
    machines = [line["machine"] for line in lines]
    loads = sorted(machine["load"] for machine in machines)
    found = {name: ", ".join(dict.fromkeys(str(each[name]) for each in machines)) for name in ("cpu", "torch", "date")}
    rows = [("CPU", found["cpu"]), ("cores", str(machines[0]["cores"])), ("torch", found["torch"])]
    rows += [("load average", f"{loads[0]} to {loads[-1]}"), ("date", found["date"])]
    return _table(("", ""), rows)


def _targets(speeds: Sequence[Line], memories: Sequence[Line]) -> str:
    """The worst line of each target."""
    sides = {
        side: [line for line in speeds if line["case"]["side"] == f"slotcar {side}"] for side in ("direct", "ring")
    }
    rows = []
    if less := [_less(line) for line in sides["direct"]]:
        met = "met" if min(less) >= _LESS else "missed"
        rows.append(
            ("direct: LoRA's part of a step, less than vLLM's own", f"≥ {_LESS:g} ×", f"{min(less):.2f} ×", met)
        )
    if ratios := [_own_step(line, speeds) / line["ms_per_step"] for line in sides["ring"]]:
        met = "met" if min(ratios) >= 1 else "missed"
        rows.append(("ring: a step, over vLLM's own", "≥ 1 ×", f"{min(ratios):.2f} ×", met))
    shared = [line for line in memories if line["case"]["side"] != "vllm-lora" and line["case"]["engines"] > 1]
    if shared:
        added = max(line["last_engine_mib"] for line in shared)
        own = min(line["last_engine_mib"] for line in memories if line["case"]["side"] == "vllm-lora")
        rows.append(("what a further engine's adapters take", "none", f"{added} MiB, vLLM's own {own} MiB", ""))
    return _table(("", "wanted", "found: worst", ""), rows)


def _less(line: Line) -> float:
    """How many times vLLM's own LoRA costs what it costs here."""
    return float(line["own_lora_ms"] / line["lora_ms"]) if line["lora_ms"] > 0 else float("inf")


def _own_step(line: Line, speeds: Sequence[Line]) -> float:
    wanted = {**line["case"], "side": "vllm-lora"}
    return next(float(other["ms_per_step"]) for other in speeds if other["case"] == wanted)


def _of_speeds(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        case = line["case"]
        step = (_ms(line["ms_per_step"]), _ms(line["p99_ms"]), _ms(line["cpu_ms_per_step"]), str(line["tokens_per_s"]))
        lora = (
            (_ms(line["lora_ms"]), _ms(line["lora_cpu_ms"]), f"{_less(line):.2f} ×") if "lora_ms" in line else ("",) * 3
        )
        rows.append((str(case["threads"]), str(case["adapters"]), case["side"], *step, *lora, str(line["runs"])))
    alike = [line["tokens_as_own"] for line in lines if "tokens_as_own" in line]
    note = (
        f"Of the tokens with slotcar, at least {100 * min(alike):.4g} % are those of vLLM's own LoRA." if alike else ""
    )
    return f"{_table(_SPEED, rows)}\n\n{note}".rstrip()


def _of_memories(lines: Sequence[Line]) -> str:
    rows = [
        (
            line["case"]["side"],
            str(line["case"]["engines"]),
            f"{line['adapters_mib']} MiB",
            f"{line['sidecar_mib']} MiB",
            f"{line['last_engine_mib']} MiB",
        )
        for line in lines
    ]
    bases = sorted({line["engine_mib"] for line in lines})
    note = f"An engine without adapters has {' to '.join(map(str, bases))} MiB." if bases else ""
    return f"{_table(_MEMORY, rows)}\n\n{note}".rstrip()


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
