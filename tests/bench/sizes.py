"""How much a benchmark does: `--smoke` shows that it runs, `--quick` fits all of them into five minutes."""

from __future__ import annotations

import argparse
from enum import IntEnum
from typing import TypeVar

__all__ = ["Size", "add_sizes", "size_wanted"]

T = TypeVar("T")


class Size(IntEnum):
    SMOKE = 0
    QUICK = 1
    FULL = 2

    def pick(self, smoke: T, quick: T, full: T) -> T:
        """The value for this size."""
        return (smoke, quick, full)[self]

    @property
    def flags(self) -> tuple[str, ...]:
        """What a benchmark is told on its command line."""
        return () if self is Size.FULL else (f"--{self.name.lower()}",)


def size_wanted(description: str | None) -> Size:
    """Reads the command line of a benchmark, which is described by the first paragraph of its docstring."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n\n")[0])
    add_sizes(parser)
    size: Size = parser.parse_args().size
    return size


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how much to do; the result has it as `size`."""
    parser.set_defaults(size=Size.FULL)
    for size, text in ((Size.SMOKE, "a few calls of the smallest cases"), (Size.QUICK, "fewer cases and runs")):
        parser.add_argument(*size.flags, dest="size", action="store_const", const=size, help=text)
