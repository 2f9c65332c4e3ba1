"""A view of one server that follows it, also over restarts: on a terminal drawn anew, else printed at each change."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import click
from rich.console import RenderableType
from slotcar_client import (
    Capacity,
    DeadlineExceeded,
    Event,
    SessionInfo,
    ShuttingDown,
    SlotcarError,
    Snapshot,
    Unavailable,
)
from slotcar_client.aio import AsyncClient, AsyncEventStream

from slotcar_sidecar.command import console, tables
from slotcar_sidecar.command.calls import follows_server

_TIMEOUT_SECONDS = 5.0
_EVENTS = 50
# One change makes several events.
_GATHER_SECONDS = 0.05
# What a screen has besides the rows of its tables and the events.
_FIXED_LINES = 15
_LEAST_ROWS = 2


@dataclass(frozen=True, slots=True)
class View:
    """What a server shows; `events` are the last of this watch, the newest last."""

    snapshot: Snapshot
    sessions: tuple[SessionInfo, ...]
    capacity: Capacity
    events: tuple[Event, ...]

    def lasting(self) -> View:
        """The same without the times that run, to tell whether anything changed."""
        return replace(self, sessions=tuple(map(_without_times, self.sessions)))


@dataclass(frozen=True, slots=True)
class Away:
    """No server answers, or it is shutting down."""

    error: SlotcarError


Show = Callable[[View | Away], None]


@click.command()
@click.option(
    "--interval",
    "interval_seconds",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Look this often, in seconds, besides after each event.",
)
@follows_server(_TIMEOUT_SECONDS)
async def watch(client: AsyncClient, out: console.Output, interval_seconds: float) -> None:
    """Watch slots, sessions, capacity and events until Ctrl-C, also over restarts of the server.

    Without a terminal, each change is printed; with --json as an object a line.
    """
    with _shown(out, client.target) as show:
        await follow(client, interval_seconds, show)


async def follow(client: AsyncClient, interval_seconds: float, show: Show) -> None:
    """Shows the server again and again. Raises SlotcarError when it answers with anything but that it is away."""
    events: deque[Event] = deque(maxlen=_EVENTS)
    while True:
        try:
            async with client.events(_EVENTS) as stream:
                await _follow_stream(client, stream, events, interval_seconds, show)
        except (Unavailable, ShuttingDown, DeadlineExceeded) as error:
            show(Away(error))
        await asyncio.sleep(interval_seconds)


async def _follow_stream(
    client: AsyncClient, stream: AsyncEventStream, events: deque[Event], interval_seconds: float, show: Show
) -> None:
    """Looks after each event and each interval, until the stream ends."""
    happened = asyncio.Event()

    async def read() -> None:
        async for event in stream:
            # The first ones are the server's past, which was seen before a reconnect.
            if event not in events:
                events.append(event)
                happened.set()

    reader = asyncio.ensure_future(read())
    try:
        while not reader.done():
            await asyncio.sleep(_GATHER_SECONDS)
            happened.clear()
            show(View(await client.snapshot(), await client.sessions(), await client.capacity(), tuple(events)))
            waiting = asyncio.ensure_future(happened.wait())
            await asyncio.wait({reader, waiting}, timeout=interval_seconds, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        await reader
    finally:
        reader.cancel()


def _without_times(session: SessionInfo) -> SessionInfo:
    return replace(
        session,
        grace_left_seconds=None,
        mappings=tuple(replace(mapping, idle_seconds=0.0) for mapping in session.mappings),
        holds=tuple(replace(hold, left_seconds=None) for hold in session.holds),
    )


# What is seen


@contextlib.contextmanager
def _shown(out: console.Output, target: str) -> Iterator[Show]:
    """How views are shown: on a screen that is drawn anew, or as text at each change."""
    if not out.is_live:
        yield Changes(out).show
        return
    last: list[View] = []
    with out.live() as live:

        def draw(view: View | Away) -> None:
            if isinstance(view, View):
                last[:] = [view]
            away = view.error if isinstance(view, Away) else None
            live.update(screen(out, target, last[0] if last else None, away), refresh=True)

        yield draw


def screen(out: console.Output, target: str, view: View | None, away: SlotcarError | None) -> RenderableType:
    """The last view, cut to the height of the terminal, and whether the server is away since."""
    status = f"away: {away.message}" if away is not None else "up"
    if view is None:
        return console.lines(f"{target}  {status}")
    version = view.snapshot.layout.version
    pins = tables.pins_of(view.sessions, view.snapshot.layout)
    outside = tables.outside(view.snapshot)
    part = max(_LEAST_ROWS, (out.height - _FIXED_LINES) // 4)
    slots = tables.slots(view.snapshot, pins).first(max(_LEAST_ROWS, out.height - _FIXED_LINES - 3 * part))
    parts: list[RenderableType] = [
        f"{target}  {status}",
        f"epoch {version.epoch}  generation {version.generation}",
        *("", *tables.capacity(view.capacity)),
        *("", out.fitted(slots)),
        *("", out.fitted(tables.sessions(view.sessions).first(part))),
    ]
    if outside.rows:
        parts += ["", out.fitted(outside.first(part))]
    return console.lines(*parts, "", *(tables.event(event, "%H:%M:%S") for event in view.events[-part:]))


class Changes:
    """Prints a view when it differs from the one before by more than the times that run."""

    def __init__(self, out: console.Output) -> None:
        self._out = out
        self._last: View | Away | None = None
        self._seen: tuple[Event, ...] = ()

    def show(self, view: View | Away) -> None:
        if isinstance(view, Away):
            if not isinstance(self._last, Away):
                self._away(view.error)
            self._last = view
            return
        lasting = view.lasting()
        if lasting != self._last:
            self._changed(view, [event for event in view.events if event not in self._seen])
        self._last, self._seen = lasting, view.events

    def _away(self, error: SlotcarError) -> None:
        if self._out.as_json:
            self._out.json({"state": "away", "reason": error.reason, "message": error.message})
        else:
            self._out.line(f"away: {error.message}\n")

    def _changed(self, view: View, events: list[Event]) -> None:
        out, version = self._out, view.snapshot.layout.version
        if out.as_json:
            out.json(_plain(view, events))
            return
        for event in events:
            out.line(tables.event(event))
        out.line(f"epoch {version.epoch} generation {version.generation}")
        for line in tables.capacity(view.capacity):
            out.line(line)
        out.rows(tables.slots(view.snapshot, tables.pins_of(view.sessions, view.snapshot.layout)))
        if view.sessions:
            out.rows(tables.sessions(view.sessions))
        out.line("")


def _plain(view: View, events: list[Event]) -> dict[str, Any]:
    return {
        "state": "up",
        **dataclasses.asdict(view.snapshot),
        "pins": [dataclasses.asdict(pin) for pin in tables.pins_of(view.sessions, view.snapshot.layout)],
        "sessions": [dataclasses.asdict(session) for session in view.sessions],
        "capacity": dataclasses.asdict(view.capacity),
        "events": [dataclasses.asdict(event) for event in events],
    }
