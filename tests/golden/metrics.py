"""Writes docs/metrics.md from the catalogue of metrics (`make docs`); --names prints tests/golden/metrics.txt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from slotcar_sidecar.ops.catalogue import CATALOGUE, Described

from tests.golden.pages import page_with

_REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = _REPOSITORY / "docs" / "metrics.md"
NAMES = _REPOSITORY / "tests" / "golden" / "metrics.txt"


def table() -> str:
    """One row per metric."""
    rows = ["| metric | type | unit | labels | |", "|---|---|---|---|---|", *map(_row, CATALOGUE)]
    return "\n".join(rows) + "\n"


def _row(one: Described) -> str:
    return f"| `{one.shown_name}` | {one.kind} | {one.unit} | {', '.join(one.labels)} | {one.text} |"


def page_with_table(text: str) -> str:
    """The page with a fresh table between its two marks."""
    return page_with(text, "metrics", table())


def names() -> Iterator[str]:
    """One line per metric: its name, type, unit and labels."""
    for one in sorted(CATALOGUE, key=lambda one: one.name):
        yield " ".join([one.name, one.kind, one.unit or "-", *sorted(one.labels)])


def names_text() -> str:
    return "".join(f"{line}\n" for line in names())


if __name__ == "__main__":
    if sys.argv[1:] == ["--names"]:
        sys.stdout.write(names_text())
    else:
        PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
