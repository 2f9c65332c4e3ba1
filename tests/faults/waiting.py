"""How these tests wait: for events of the sidecar, or, where it has none, by looking until a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slotcar_client import Client, Event
from slotcar_client.events import EventStream

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


class Watcher:
    """The events of a sidecar from its making on."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self.seen: list[Event] = []

    def wait(self, kind: str, **wanted: object) -> Event:
        """The next event of that kind with those fields, after those that were waited for; fails at the deadline."""
        timer = threading.Timer(PATIENCE_SECONDS, self._events.close)
        timer.start()
        try:
            for event in self._events:
                self.seen.append(event)
                assert not event.missed
                if event.kind == kind and all(getattr(event, key) == value for key, value in wanted.items()):
                    return event
        finally:
            timer.cancel()
        raise AssertionError(f"no {kind} {wanted} among {[(e.kind, e.name, e.reason) for e in self.seen]}")


@contextmanager
def watching(client: Client) -> Iterator[Watcher]:
    with client.events() as events:
        yield Watcher(events)
