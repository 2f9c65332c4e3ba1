"""Writes docs/dashboard.md from the code of the Grafana dashboard: `make docs`."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden.pages import page_with

_REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = _REPOSITORY / "docs" / "dashboard.md"
DASHBOARD = _REPOSITORY / "deploy" / "grafana" / "dashboard.py"


def tables() -> str:
    """One table for each row of the dashboard, with a line for each query."""
    rows: dict[str, list[str]] = {}
    for panel in runpy.run_path(str(DASHBOARD))["PANELS"]:
        rows.setdefault(panel.row, []).extend(_lines(panel))
    head = "| panel | what it shows | shown as | query |\n|---|---|---|---|\n"
    return "\n".join(f"## {row}\n\n{head}{''.join(lines)}" for row, lines in rows.items())


def _lines(panel: Any) -> Iterator[str]:
    unit = "" if panel.unit == "short" else f", {panel.unit}"
    about = (panel.title, panel.text, f"{panel.kind}{unit}")
    for expression, legend in panel.queries:
        name = f"{legend}: " if legend else ""
        yield f"| {' | '.join(about)} | {name}`{expression}` |\n"
        about = ("", "", "")


def page_with_tables(text: str) -> str:
    """The page with what is generated between its marks."""
    return page_with(text, "panels", tables())


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
