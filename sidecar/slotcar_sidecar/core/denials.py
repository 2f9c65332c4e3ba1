"""Tells of refused calls, of each client at most a few a second: who floods the server must not flood its log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

_SECONDS = 1.0
_MOST = 5


@dataclass(slots=True)
class _Window:
    """What of one client was told, and was not, since `start`."""

    start: float
    told: int = 0
    untold: int = 0


class Denials:
    """`told` is called with what `tell` passes on; `untold` in it says how many it kept to itself before.

    Invariant: as many windows as a policy has clients, and one for all others.
    """

    def __init__(self, clock: Callable[[], float], told: Callable[[Mapping[str, object]], None]) -> None:
        self._clock = clock
        self._told = told
        self._windows: dict[str, _Window] = {}

    def tell(self, client: str, facts: Mapping[str, object]) -> None:
        """One refusal of `client`, "" where nobody is known."""
        now = self._clock()
        window = self._windows.get(client)
        if window is None or now - window.start >= _SECONDS:
            window = self._windows[client] = _Window(now, untold=window.untold if window else 0)
        if window.told == _MOST:
            window.untold += 1
            return
        window.told += 1
        untold, window.untold = window.untold, 0
        self._told({**facts, "untold": untold} if untold else facts)
