"""Waits for what a server tells: the events from now on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slotcar.v1 import adapter_service_pb2 as pb

from tests.conformance.target import PATIENCE_SECONDS, Target


class Watcher:
    """A subscription whose greeting has come; `seen` has the events that were read."""

    def __init__(self, target: Target) -> None:
        self.call = target.adapters.WatchEvents(pb.WatchEventsRequest(), timeout=2 * PATIENCE_SECONDS)
        next(self.call)
        self.seen: list[pb.Event] = []

    def wait(self, kind: pb.EventKind.ValueType, **wanted: str) -> pb.Event:
        """The next event of that kind with those fields."""
        for message in self.call:
            self.seen.append(message.event)
            if message.event.kind == kind and all(getattr(message.event, key) == wanted[key] for key in wanted):
                return message.event
        raise AssertionError(f"no {pb.EventKind.Name(kind)} {wanted} among {self.seen}")


@contextmanager
def watching(target: Target) -> Iterator[Watcher]:
    watcher = Watcher(target)
    try:
        yield watcher
    finally:
        watcher.call.cancel()
