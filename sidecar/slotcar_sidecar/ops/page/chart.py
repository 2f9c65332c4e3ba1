"""The last loads on an axis of time, as numbers for an SVG, with what was evicted or refused meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from slotcar_sidecar.ops.state import Load, State

WIDTH, HEIGHT = 1000.0, 64.0
_LEAST_SPAN_SECONDS = 60.0
_LEAST_HEIGHT = 2.0
_MARKED = ("evicted", "refused")


@dataclass(frozen=True, slots=True)
class Bar:
    """A stage of a load: `y` is the upper edge."""

    stage: str
    x: float
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a moment."""

    kind: str
    x: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """`start` and `end` are the ends of the axis in Unix seconds, `most_seconds` is the longest load."""

    start: float
    end: float
    most_seconds: float
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    width: float = WIDTH
    height: float = HEIGHT


def timeline(state: State) -> Timeline:
    """From the first of the last loads, and a minute ago at the latest, until now."""
    start = min((load.started for load in state.loads), default=state.time)
    start = min(start, state.time - _LEAST_SPAN_SECONDS)
    most = max((load.seconds for load in state.loads), default=0.0)

    def place(time: float) -> float:
        return round(WIDTH * (time - start) / (state.time - start), 1)

    bars = tuple(bar for load in state.loads for bar in _bars(load, place(load.started), most))
    marks = tuple(
        Mark(event.kind, place(event.time)) for event in state.events if event.kind in _MARKED and event.time >= start
    )
    return Timeline(start, state.time, most, bars, marks)


def _bars(load: Load, x: float, most_seconds: float) -> list[Bar]:
    """The stages of a load on top of each other; heights grow with the root, so that short loads are seen too."""
    whole = max(_LEAST_HEIGHT, HEIGHT * (load.seconds / most_seconds) ** 0.5) if most_seconds else _LEAST_HEIGHT
    bars: list[Bar] = []
    bottom = HEIGHT
    for stage, seconds in load.stages:
        height = whole * (seconds / load.seconds if load.seconds else 1 / len(load.stages))
        bottom -= height
        bars.append(Bar(stage, x, round(bottom, 2), round(height, 2)))
    return bars
