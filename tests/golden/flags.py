"""Writes the table of flags in docs/operations.md from the settings themselves: `make docs`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from slotcar_sidecar.config import ENVIRONMENT_PREFIX, Config, size_text

from tests.golden.pages import page_with

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def table() -> str:
    """One row per setting: its flag, its variable, its default and what it is."""
    lines = ["| flag | variable | default | |", "|---|---|---|---|"]
    for item in dataclasses.fields(Config):
        flag, variable = f"--{item.name.replace('_', '-')}", f"{ENVIRONMENT_PREFIX}{item.name.upper()}"
        text = item.metadata["help"]
        if choices := item.metadata.get("choices"):
            text += f" One of {', '.join(choices)}."
        lines.append(f"| `{flag}` | `{variable}` | {_shown(item)} | {text} |")
    return "\n".join(lines) + "\n"


def page_with_table(text: str) -> str:
    """The page with a fresh table between its two marks."""
    return page_with(text, "flags", table())


def _shown(item: dataclasses.Field[object]) -> str:
    value = item.default
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(f"`{part}`" for part in value)
    if isinstance(value, int) and item.metadata.get("size"):
        return f"`{size_text(value)}`"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
