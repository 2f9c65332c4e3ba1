"""What the status page remembers of what happened, bounded: the last loads, what became of names, when slots were used.

Written and read on the owner's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.core.ids import AdapterName, Digest
from slotcar_sidecar.ops.state import Failure, Left, Most

T = TypeVar("T")

STAGES = ("read", "wait", "fill")
_SAME_LOAD_SECONDS = 5.0
"""Stages of a digest that are further apart are of different loads."""
_MOST_NAMES = 1000
_MOST_CHARACTERS = 500
_MOST_MOMENTS = 4096


@dataclass(frozen=True, slots=True)
class Timed:
    """A load of a digest, with its stages so far; times are in Unix seconds."""

    digest: Digest
    started: float
    ended: float
    stages: tuple[tuple[str, float], ...]

    def may_go_on(self, stage: str, start: float) -> bool:
        """Whether a stage that began at `start` is a later one of the same load."""
        last = self.stages[-1][0]
        return STAGES.index(stage) > STAGES.index(last) and start - self.ended < _SAME_LOAD_SECONDS


class LoadLog:
    """The last loads, by when they began to do something."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._loads: OrderedDict[int, Timed] = OrderedDict()
        self._latest: dict[Digest, int] = {}
        self._next = 0

    def stage(self, stage: str, seconds: float, digest: Digest) -> None:
        """A load of the digest has just ended a stage; see Observer.load_stage."""
        now = self._wall_clock()
        number = self._latest.get(digest, -1)
        load = self._loads.get(number)
        if load is not None and load.may_go_on(stage, now - seconds):
            self._loads[number] = replace(load, ended=now, stages=(*load.stages, (stage, seconds)))
            return
        self._loads[self._next] = Timed(digest, now - seconds, now, ((stage, seconds),))
        self._latest[digest] = self._next
        self._next += 1
        if len(self._loads) > Most.LOADS:
            number, load = self._loads.popitem(last=False)
            if self._latest[load.digest] == number:
                del self._latest[load.digest]

    def latest_first(self) -> tuple[Timed, ...]:
        return tuple(reversed(self._loads.values()))


class NameLog:
    """Why the last load of a name was refused, and why a name lost its slot; of the last names that it happened to."""

    def __init__(self) -> None:
        self._failures: OrderedDict[AdapterName, Failure] = OrderedDict()
        self._left: OrderedDict[AdapterName, Left] = OrderedDict()

    def note(self, event: Event) -> None:
        """An event happened."""
        name = event.name
        if name is None:
            return
        if event.kind is EventKind.REFUSED:
            _put(self._failures, name, Failure(event.time, event.reason[:_MOST_CHARACTERS]))
        elif event.kind is EventKind.EVICTED:
            _put(self._left, name, Left(event.time, event.reason))
        elif event.kind is EventKind.UNLOADED:
            self._failures.pop(name, None)
            self._left.pop(name, None)
        elif event.kind in (EventKind.LOADED, EventKind.REPLACED) and name in self._failures:
            self._failures[name] = replace(self._failures[name], is_over=True)

    def failure(self, name: AdapterName) -> Failure | None:
        return self._failures.get(name)

    def left(self, name: AdapterName) -> Left | None:
        return self._left.get(name)

    def latest_first(self) -> tuple[AdapterName, ...]:
        """The names that were refused, then those that lost their slots."""
        return tuple(dict.fromkeys([*reversed(self._failures), *reversed(self._left)]))


def _put(table: OrderedDict[AdapterName, T], name: AdapterName, what: T) -> None:
    table[name] = what
    table.move_to_end(name)
    if len(table) > _MOST_NAMES:
        table.popitem(last=False)


class UseTimes:
    """When moments of core.policy.Uses were, as exactly as it is told of them; the older, the less exactly."""

    def __init__(self) -> None:
        self._moments: list[int] = []
        self._times: list[float] = []

    def note(self, moment: int, now: float) -> None:
        """`moment` is the latest at the time `now`."""
        if self._moments and moment <= self._moments[-1]:
            return
        self._moments.append(moment)
        self._times.append(now)
        if len(self._moments) > _MOST_MOMENTS:
            half = _MOST_MOMENTS // 2
            self._moments[:half], self._times[:half] = self._moments[:half:2], self._times[:half:2]

    def seconds_since(self, moment: int, now: float) -> float | None:
        """How long ago a moment was; None for one that never was."""
        if moment == 0:
            return None
        place = bisect_left(self._moments, moment)
        return max(0.0, now - self._times[place]) if place < len(self._times) else 0.0
