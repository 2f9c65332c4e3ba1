"""Follows one server, also over its restarts: what it shows, after each event and each interval."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import click
from slotcar_client import (
    Capacity,
    DeadlineExceeded,
    DesiredAdapter,
    Event,
    SessionInfo,
    SlotcarError,
    Snapshot,
)
from slotcar_client.aio import AsyncClient, AsyncEventStream

from slotcar_sidecar.command.calls import GONE, Seconds

TIMEOUT_SECONDS = 5.0
EVENTS = 50
# One change makes several events.
_GATHER_SECONDS = 0.05
# What is wanted of an entry that is declared.
_REACHED = ("ready", "absent")


@dataclass(frozen=True, slots=True)
class View:
    """What a server shows; `events` are the last that were seen, the newest last.

    `undone` are the declared adapters that are not what is wanted.
    """

    snapshot: Snapshot
    sessions: tuple[SessionInfo, ...]
    capacity: Capacity
    undone: tuple[DesiredAdapter, ...]
    events: tuple[Event, ...]

    def lasting(self) -> View:
        """The same without the times that run, to tell whether anything changed."""
        undone = tuple(replace(each, since_seconds=0.0, next_try_seconds=None) for each in self.undone)
        return replace(self, sessions=tuple(map(_without_times, self.sessions)), undone=undone)


@dataclass(frozen=True, slots=True)
class Away:
    """No server answers, or it is shutting down."""

    error: SlotcarError


Show = Callable[[View | Away], None]

interval = click.option(
    "--interval",
    "interval_seconds",
    type=Seconds(min=0.1),
    default=1.0,
    show_default=True,
    help="Look this often, in seconds, besides after each event.",
)


async def look(client: AsyncClient, events: tuple[Event, ...]) -> View:
    """What there is now. Raises SlotcarError."""
    desired = await client.desired()
    undone = tuple(each for each in desired.adapters if each.state not in _REACHED)
    return View(await client.snapshot(), await client.sessions(), await client.capacity(), undone, events)


async def follow(client: AsyncClient, interval_seconds: float, show: Show) -> None:
    """Shows the server again and again. Raises SlotcarError when it answers with anything but that it is away."""
    events: deque[Event] = deque(maxlen=EVENTS)
    while True:
        try:
            async with client.events(EVENTS) as stream:
                await _follow_stream(client, stream, events, interval_seconds, show)
        except (*GONE, DeadlineExceeded) as error:
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
            show(await look(client, tuple(events)))
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
