"""Slotcar's rules at the pace of a game day: every duration a factor shorter, every threshold as it is.

Prometheus scrapes and evaluates twice a second meanwhile, so that the shortest window still has samples enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.ops.prometheus import RULES

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])")
_FOR = re.compile(r"(?<=^        for: )(\d+)([smhd])$", re.MULTILINE)
_RATE_SECONDS = 300
_LEAST_WINDOW_SECONDS = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """How many times faster than in earnest alerts are. Raises ValueError for a factor that leaves no samples."""

    factor: int

    def __post_init__(self) -> None:
        most = _RATE_SECONDS // _LEAST_WINDOW_SECONDS
        if not 1 <= self.factor <= most:
            raise ValueError(f"the pace is {self.factor}, and must be from 1 to {most}")

    def rules(self) -> str:
        """The text of deploy/prometheus/slotcar.rules.yaml with shorter windows and shorter `for`."""
        text = _WINDOW.sub(self._shorter, RULES.read_text(encoding="utf-8"))
        return _FOR.sub(self._shorter, text)

    def _shorter(self, found: re.Match[str]) -> str:
        return f"{int(found[1]) * _SECONDS[found[2]] * 1000 // self.factor}ms"

    @property
    def rate_interval(self) -> str:
        """What a dashboard has in the place of $__rate_interval."""
        return f"{_RATE_SECONDS * 1000 // self.factor}ms"
