"""The report makes a table and plots of what benchmarks print, whatever they could not measure; each benchmark runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench import __main__ as runner
from tests.bench import report
from tests.bench.charts import CHARTS
from tests.bench.harness import Peer, Record, Took
from tests.bench.sizes import Size
from tests.bench.targets import TARGETS

REPOSITORY = Path(__file__).resolve().parents[2]
MACHINE = {"cpu": "a CPU", "flags": "avx2 fma", "cores": 2, "kernel": "6.1", "torch": "2", "threads": 1, "load": 0.5}


def record(plane: str, peer: Peer, ours_us: float, peer_us: float, **case: Any) -> dict[str, Any]:
    """One line of `planes`; nothing of it depends on where the test runs."""
    fields = {"work": "echo", "bytes": 16 << 10, "cores": 1, "plane": plane, "call": "client", **case}
    sides = ("slotcar", [Took(ours_us, ours_us)] * 3), (peer, [Took(peer_us, peer_us)] * 3)
    return asdict(replace(Record.of("planes", fields, *sides), machine={**MACHINE, "date": "2026-01-01"}))


LINES = [
    record("ring", "eventfd", 20.0, 10.0, target=True),
    record("ring", "grpc-unary", 20.0, 300.0, target=True),
    record("direct", "in-process", 2.5, 2.0, target=True, call="kernel"),
    record("direct", "in-process", 2.9, 2.0, target=True, call="kernel", bytes=128 << 10),
    {"bench": "step", "case": {"plane": "ring"}, "skipped": "no such plane"},
]


def write(folder: Path, lines: Sequence[dict[str, Any]]) -> str:
    """The report of these lines, which lie in two files."""
    files = [folder / "first.jsonl", folder / "second.jsonl"]
    for file, part in zip(files, (lines[:2], lines[2:]), strict=True):
        file.write_text("".join(json.dumps(line) + "\n" for line in part), encoding="utf-8")
    report.write_report(files, folder / "out")
    return (folder / "out" / "index.md").read_text(encoding="utf-8")


def row_of(text: str, start: str) -> list[str]:
    """The cells of the first row that starts so."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_targets_are_judged_by_their_worst_line(tmp_path: Path) -> None:
    text = write(tmp_path, LINES)
    assert row_of(text, "planes: ring, 16 KiB echo: over two")[1:] == ["≤ 2.5 ×", "2 ×", "2 ×", "1", "met"]
    assert row_of(text, "planes: ring, 16 KiB echo: less")[1:] == ["≥ 20 ×", "15 ×", "15 ×", "1", "missed"]
    assert row_of(text, "planes: direct")[1:] == ["≤ 1 µs", "0.9 µs", "0.5 µs", "2", "met"]
    assert row_of(text, "e2e: direct: of")[1:] == ["≥ 0.97 ×", "", "", "0", "not measured"]


def test_each_line_is_a_row_and_each_benchmark_a_plot(tmp_path: Path) -> None:
    text = write(tmp_path, LINES)
    section = text.partition("## planes")[2]
    assert "In all: work echo, cores 1." in section
    assert row_of(section, "16,384 | ring | client | grpc-unary")[4:7] == ["20.0 µs", "300.0 µs", "**15**"]
    assert "- step, plane ring: no such plane" in text
    svg = (tmp_path / "out" / "planes.svg").read_text(encoding="utf-8")
    assert svg.startswith("<?xml")
    assert {"slotcar ring", "grpc-unary", "echo, 16 KiB, cores: 1"} <= {line.strip("<>") for line in _texts(svg)}


def _texts(svg: str) -> list[str]:
    """What can be read in a plot."""
    return [part.partition("</text>")[0].rpartition(">")[2] for part in svg.split("<text")[1:]]


def test_the_same_lines_give_the_same_files(tmp_path: Path) -> None:
    found = []
    for name in "ab":
        (tmp_path / name).mkdir()
        write(tmp_path / name, LINES)
        found.append({path.name: path.read_bytes() for path in (tmp_path / name / "out").iterdir()})
    assert found[0] == found[1]


def test_the_machine_is_described_without_its_names(tmp_path: Path) -> None:
    text = write(tmp_path, LINES)
    assert row_of(text, "instructions")[1] == "avx2 fma"
    assert row_of(text, "date")[1] == "2026-01-01"
    assert os.uname().nodename not in text
    assert str(REPOSITORY) not in text


def test_each_benchmark_has_a_chart() -> None:
    assert set(CHARTS) == set(runner.BENCHES) >= {target.bench for target in TARGETS}


@pytest.mark.full
@pytest.mark.parametrize("bench", runner.BENCHES)
def test_each_benchmark_runs(bench: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench", bench, *Size.SMOKE.flags, "--out", str(tmp_path / "lines.jsonl")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["bench"] for line in lines if "skipped" not in line} == {bench}
    report.write_report([tmp_path / "lines.jsonl"], tmp_path / "out")
    assert (tmp_path / "out" / f"{bench}.svg").exists()
