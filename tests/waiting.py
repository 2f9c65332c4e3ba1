"""How tests wait for what no event tells: by looking until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.005


def eventually(
    condition: Callable[[], object], what: str = "the condition", patience_seconds: float = PATIENCE_SECONDS
) -> None:
    """Returns when `condition` holds; fails at the deadline."""
    deadline = time.monotonic() + patience_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {patience_seconds:g} s"
        time.sleep(_LOOK_SECONDS)


class StandsStill:
    """True once a number has been the same for a while."""

    def __init__(self, number: Callable[[], int], looks: int = 100) -> None:
        self._number = number
        self._looks = looks
        self._last, self._same = -1, 0

    def __call__(self) -> bool:
        now = self._number()
        self._same = self._same + 1 if now == self._last and now else 0
        self._last = now
        return self._same >= self._looks
