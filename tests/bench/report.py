"""Makes the table and the plots of docs/measurements from lines that benchmarks printed.

`python -m tests.bench.report FILE.jsonl … --out docs/measurements`
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.charts import CHARTS
from tests.bench.targets import TARGETS, Line

__all__ = ["write_report"]

_BENCHES = ("kernels", "planes", "step", "load", "beside", "hits", "mapping", "clients", "e2e")
_HEAD = """# Measurements

`make bench-full` makes this page; `make bench` measures less, in less than five minutes. A machine that does something
else meanwhile gives other numbers.

Both sides of a line were timed in turns, in one run; times are medians. A ratio is peer / slotcar: above 1, slotcar is
the faster. In bold are the lines that the targets speak of.
"""
_COLUMNS = ("peer", "slotcar", "peer's", "ratio", "p99", "peer's p99", "CPU", "peer's CPU", "runs")


def write_report(files: Iterable[Path], out: Path) -> None:
    """Writes index.md and a plot for each benchmark into `out`. Raises KeyError when a line is not one of theirs."""
    lines = [json.loads(text) for file in files for text in file.read_text(encoding="utf-8").splitlines() if text]
    measured = [line for line in lines if "skipped" not in line]
    out.mkdir(parents=True, exist_ok=True)
    sections = [_HEAD, _machine(measured), _targets(measured)]
    for bench in _BENCHES:
        mine = [line for line in measured if line["bench"] == bench]
        if mine:
            CHARTS[bench].draw(mine, out / f"{bench}.svg")
            plot = f"![{CHARTS[bench].title}]({bench}.svg)"
            sections.append(f"## {bench}\n\n{_what(bench)}\n\n{plot}\n\n{_table(mine)}")
    skipped = dict.fromkeys(_skipped(line) for line in lines if "skipped" in line)
    if skipped:
        sections.append("## Not measured\n\n" + "\n".join(skipped))
    (out / "index.md").write_text("\n".join(f"{section.rstrip()}\n" for section in sections), encoding="utf-8")


def _what(bench: str) -> str:
    """What the benchmark says of itself."""
    module = ast.parse(Path(__file__).with_name(f"{bench}.py").read_text(encoding="utf-8"))
    return ast.get_docstring(module) or ""


def _machine(lines: Sequence[Line]) -> str:
    """What the lines were measured on; where they differ, all of it."""
    machines = [line["machine"] for line in lines]
    loads = sorted(machine["load"] for machine in machines)
    rows = {
        "CPU": _all(machine["cpu"] for machine in machines),
        "instructions": _all(machine.get("flags", "") for machine in machines),
        "cores": str(max((machine["cores"] for machine in machines), default="")),
        "threads of torch": _all(machine["threads"] for machine in machines),
        "Linux": _all(machine.get("kernel", "") for machine in machines),
        "torch": _all(machine["torch"] for machine in machines),
        "load average": f"{loads[0]} to {loads[-1]}" if loads else "",
        "date": _all(machine.get("date", "") for machine in machines),
    }
    return "## The machine\n\n| | |\n|---|---|\n" + "\n".join(f"| {name} | {text} |" for name, text in rows.items())


def _all(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value))


def _targets(lines: Sequence[Line]) -> str:
    """Each target with what was found, the worst and the best line."""
    rows = ["## Targets\n", "| | wanted | found: worst | best | lines | |", "|---|---|---|---|---|---|"]
    for target in TARGETS:
        values, text = target.values(lines), target.measure.text
        found = f"{text(values[0])} | {text(values[-1])}" if values else " | "
        verdict = "not measured" if not values else "met" if target.is_met_by(values[0]) else "missed"
        rows.append(f"| {target.bench}: {target.text} | {target.wanted} | {found} | {len(values)} | {verdict} |")
    return "\n".join(rows)


def _table(lines: Sequence[Line]) -> str:
    """Every line; what they all have in common stands before."""
    names = dict.fromkeys(name for line in lines for name in line["case"] if name != "target")
    values = {name: {_text(line["case"].get(name)) for line in lines} for name in names}
    common = [f"{name} {next(iter(found))}" for name, found in values.items() if len(found) == 1]
    varying = [name for name, found in values.items() if len(found) > 1]
    head = [*varying, *_COLUMNS]
    rows = [head, ["---"] * len(head), *(list(_cells(line, varying)) for line in lines)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    folded = f"<details><summary>{len(lines)} lines</summary>\n\n{table}\n\n</details>"
    return f"In all: {', '.join(common)}.\n\n{folded}" if common else folded


def _cells(line: Line, varying: Sequence[str]) -> Iterator[str]:
    yield from (_text(line["case"].get(name)) for name in varying)
    yield str(line["peer"])
    amount = _time if line["unit"] == "us" else _count
    yield from (amount(line[name]) for name in ("ours_median", "peer_median"))
    ratio = line["peer_median"] / line["ours_median"]
    yield f"**{ratio:.3g}**" if line["case"].get("target") else f"{ratio:.3g}"
    yield from (amount(line[name]) for name in ("ours_p99", "peer_p99"))
    yield from (_time(line[name]) if amount is _time else "" for name in ("ours_cpu_median", "peer_cpu_median"))
    yield str(line["runs"])


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def _time(microseconds: float) -> str:
    if microseconds >= 1e4:
        return f"{microseconds / 1e3:,.1f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:,.2f} s"
    return f"{microseconds:,.1f} µs" if microseconds < 1e3 else f"{microseconds:,.0f} µs"


def _count(value: float) -> str:
    return f"{value:,.1f}"


def _skipped(line: Line) -> str:
    what = ", ".join(f"{name} {value}" for name, value in line["case"].items())
    return f"- {line['bench']}, {what}: {line['skipped']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="what benchmarks printed")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    arguments = parser.parse_args()
    write_report(arguments.files, arguments.out)


if __name__ == "__main__":
    main()
