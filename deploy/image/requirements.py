"""Prints what parts of slotcar require, for pip: `slotcar` is what it always requires, another name an extra."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(parts: list[str]) -> list[str]:
    """The requirements of the parts, in pyproject.toml's order."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [line for part in parts for line in (project["dependencies"] if part == "slotcar" else extras[part])]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(sys.argv[1:])) + "\n")
