"""The page of vLLM's measurements says what its lines say, and what it installs leaves out only what it names."""

from __future__ import annotations

from typing import Any

from tests.bench.vllm.table import page
from tests.vllm.environment import wanted

MACHINE = {"cpu": "a CPU", "cores": 2, "torch": "2", "load": 0.5, "date": "2026-01-01"}


def speed(side: str, step: float, lora: float | None = None, own_lora: float = 90.0) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "ms_per_step": step,
        "p99_ms": step,
        "cpu_ms_per_step": step,
        "tokens_per_s": 1.0,
        "runs": 4,
    }
    if lora is not None:
        figures |= {"lora_ms": lora, "lora_cpu_ms": lora, "own_lora_ms": own_lora, "tokens_as_own": 1.0}
    case = {"side": side, "adapters": 0 if side == "base" else 8, "threads": 1, "rows": 32, "rank": 16, "model": "m"}
    return {"bench": "vllm", "case": case, **figures, "machine": MACHINE}


def memory(side: str, engines: int, over: int, last: int) -> dict[str, Any]:
    case = {"side": side, "engines": engines, "adapters": 8, "rank": 16}
    sizes = {"engine_mib": 700, "adapters_mib": over, "sidecar_mib": 0, "last_engine_mib": last}
    return {"bench": "vllm-memory", "case": case, **sizes, "machine": MACHINE}


SPEEDS = [
    speed("base", 100.0),
    speed("vllm-lora", 190.0, 90.0),
    speed("slotcar direct", 120.0, 20.0),
    speed("slotcar ring", 200.0, 100.0),
]
MEMORIES = [
    memory("vllm-lora", 1, 300, 300),
    memory("vllm-lora", 2, 610, 310),
    memory("slotcar direct", 1, 400, 400),
    memory("slotcar direct", 2, 402, 2),
]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_targets_have_their_worst_line() -> None:
    found = {row[0]: row[1:] for row in rows(page([*SPEEDS, *MEMORIES]))}
    assert found["direct: LoRA's part of a step, less than vLLM's own"] == ["≥ 3 ×", "4.50 ×", "met"]
    assert found["ring: a step, over vLLM's own"] == ["≥ 1 ×", "0.95 ×", "missed"]
    assert found["what a further engine's adapters take"] == ["none", "2 MiB, vLLM's own 300 MiB", ""]


def test_each_line_is_a_row() -> None:
    text = page([*SPEEDS, *MEMORIES])
    assert ["1", "8", "slotcar direct", *["120.0 ms"] * 3, "1.0", "20.0 ms", "20.0 ms", "4.50 ×", "4"] in rows(text)
    assert ["1", "0", "base", *["100.0 ms"] * 3, "1.0", "", "", "", "4"] in rows(text)
    assert ["slotcar direct", "2", "402 MiB", "0 MiB", "2 MiB"] in rows(text)
    assert "at least 100 % are those of vLLM's own LoRA" in text


def test_only_what_text_does_not_need_is_left_out() -> None:
    asked = [
        "regex",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision; platform_machine != 'riscv64'",
        "torchaudio",
        "torchcodec>=0.14",
        "fastapi[standard]<0.137.0,>=0.133.0",
        'bench; extra == "bench"',
        "torch-like>=1",
    ]
    assert wanted(asked) == ["torch", "regex", "fastapi[standard]<0.137.0,>=0.133.0", "torch-like>=1"]
