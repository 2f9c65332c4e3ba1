"""How these tests wait for events of the sidecar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slotcar_client import Client, Event
from slotcar_client.events import EventStream

from tests.waiting import PATIENCE_SECONDS


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
