"""`make bench-vllm` measures every side, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_side_is_measured_and_gives_the_same_tokens(tmp_path: Path) -> None:
    out, table = tmp_path / "lines.jsonl", tmp_path / "page.md"
    command = [sys.executable, "-m", "tests.bench.vllm", "--smoke", "--out", str(out), "--table", str(table)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    sides = [line["case"]["side"] for line in lines if line["bench"] == "vllm"]
    assert sides == ["base", "vllm-lora", "slotcar direct", "slotcar ring"]
    assert {line["tokens_as_own"] for line in lines if "tokens_as_own" in line} == {1.0}
    assert max(line.get("tokens_as_base", 0) for line in lines) < 0.5, "the adapters change nothing"
    memories = [line["case"]["side"] for line in lines if line["bench"] == "vllm-memory"]
    assert memories == ["vllm-lora", "slotcar direct"]
    assert "| slotcar ring |" in table.read_text(encoding="utf-8")
