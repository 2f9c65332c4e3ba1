"""Who may load when: first come, first served, a few at a time; what is slow has a lane of its own."""

from __future__ import annotations

from collections import deque

from slotcar_sidecar.core.desired import Load, Look

# Callers find the rest of the places for reads free; see cache.reads.
_MOST = 2


class Lane:
    """Actions that wait, and how many are under way."""

    def __init__(self) -> None:
        self._waiting: deque[Load | Look] = deque()
        self._under_way = 0

    def add(self, action: Load | Look) -> None:
        self._waiting.append(action)

    def take(self) -> Load | Look | None:
        """The next action that may begin, None if none may; `done` gives its place back."""
        if not self._waiting or self._under_way >= _MOST:
            return None
        self._under_way += 1
        return self._waiting.popleft()

    def done(self) -> None:
        """An action that was taken has ended, or did not begin."""
        self._under_way -= 1
