"""What is explored: a plane, how many slots and digests, what may happen and how often."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tests.property.reader_writer.rules import Plane
from tests.property.reader_writer.state import Bounds


class Event(Enum):
    """What nobody asked the writer or the reader about."""

    FILL_FAILS = "a fill fails"
    UNLOAD = "unload"
    FORCE = "forced unload"
    EXPIRE = "pins end"
    END = "the session ends"
    KILL = "kill -9"
    CLOSE = "orderly end"


class Configuration(NamedTuple):
    """Bounds on one history; each of `events` may be any of its events."""

    plane: Plane
    slots: int
    digests: str
    bounds: Bounds
    events: frozenset[Event] = frozenset(Event)

    def __str__(self) -> str:
        counts = {"slots": self.slots, "digests": len(self.digests), **self.bounds._asdict()}
        return f"{self.plane.value}: " + " ".join(f"{name}={count}" for name, count in counts.items())


CONFIGURATIONS = (
    Configuration(Plane.SIDECAR, 1, "AC", Bounds(fills=3, maps=2, calls=2, events=2)),
    Configuration(Plane.SIDECAR, 2, "ABC", Bounds(fills=3, maps=2, calls=1, events=1)),
    Configuration(Plane.DIRECT, 1, "AC", Bounds(fills=3, maps=2, calls=1, events=2)),
    Configuration(Plane.DIRECT, 2, "ABC", Bounds(fills=3, maps=2, calls=1, events=1)),
)
LARGE_CONFIGURATIONS = (
    Configuration(Plane.SIDECAR, 1, "AC", Bounds(fills=4, maps=3, calls=2, events=3)),
    Configuration(Plane.SIDECAR, 2, "ABC", Bounds(fills=3, maps=3, calls=2, events=1)),
    Configuration(Plane.DIRECT, 1, "AC", Bounds(fills=3, maps=3, calls=2, events=2)),
    Configuration(Plane.DIRECT, 2, "ABC", Bounds(fills=3, maps=3, calls=2, events=1)),
)
