"""Tells of refused calls, of each client at most a few a second: who floods the server must not flood its log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_SECONDS = 1.0
_MOST = 5


@dataclass(slots=True)
class _Window:
    """What of one client was told, and was not, since `start`; `latest` is the last that was not."""

    start: float
    told: int = 0
    untold: int = 0
    latest: Mapping[str, object] = field(default_factory=dict)


class Denials:
    """`told` is called with what `tell` passes on; `untold` in it says how many it kept to itself before.

    Invariant: after a `look` there are windows of the last second alone, and no refusal of before is untold.
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
            window.untold, window.latest = window.untold + 1, facts
            return
        window.told += 1
        untold, window.untold = window.untold, 0
        self._pass_on(facts, untold)

    def look(self) -> None:
        """Tells of the last refusal of each burst that is over, with how many before it were not told of."""
        now = self._clock()
        over = [client for client, window in self._windows.items() if now - window.start >= _SECONDS]
        for client in over:
            window = self._windows.pop(client)
            if window.untold:
                self._windows[client] = _Window(now, told=1)
                self._pass_on(window.latest, window.untold - 1)

    def _pass_on(self, facts: Mapping[str, object], untold: int) -> None:
        self._told({**facts, "untold": untold} if untold else facts)
