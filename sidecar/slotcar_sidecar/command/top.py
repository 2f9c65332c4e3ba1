"""`slotcar top`: one server on one screen, drawn anew as it changes, also over its restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator

import click
from rich.console import RenderableType
from slotcar_client import SlotcarError
from slotcar_client.aio import AsyncClient

from slotcar_sidecar.command import console, tables
from slotcar_sidecar.command.calls import follows_server
from slotcar_sidecar.command.following import EVENTS, TIMEOUT_SECONDS, Away, View, follow, interval, look
from slotcar_sidecar.command.tables import Rows
from slotcar_sidecar.command.watch import plain

# What a screen has besides the rows of its tables and the events.
_FIXED_LINES = 17
_LEAST_ROWS = 2
_QUIT = b"qQ"


@click.command()
@interval
@follows_server(TIMEOUT_SECONDS)
async def top(client: AsyncClient, out: console.Output, interval_seconds: float) -> None:
    """Show slots, tiers, sessions, adapters and events on one screen until q or Ctrl-C.

    Where there is no terminal, and with --json, it shows them once. `slotcar watch` prints them at each change.
    """
    if not out.is_live:
        await _show_once(client, out)
        return
    with out.live() as live, _ended_by_key():
        last: list[View] = []

        def draw(view: View | Away) -> None:
            if isinstance(view, View):
                last[:] = [view]
            away = view.error if isinstance(view, Away) else None
            live.update(screen(out, client.target, last[0] if last else None, away), refresh=True)

        await follow(client, interval_seconds, draw)


async def _show_once(client: AsyncClient, out: console.Output) -> None:
    async with client.events(EVENTS) as stream:
        events = tuple([await anext(stream) for _ in range(stream.replayed)])
        view = await look(client, events)
    if out.as_json:
        out.json(plain(view, view.events))
        return
    for line in _head(client.target, view, None):
        out.line(line)
    for rows in _parts(view):
        out.line("")
        out.rows(rows)
    out.line("")
    for event in view.events:
        out.line(tables.event(event))


@contextlib.contextmanager
def _ended_by_key() -> Iterator[None]:
    """Cancels the task that is in the context when somebody presses q."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if task is None or not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def read() -> None:
        pressed = os.read(keyboard, 16)
        if not pressed or any(key in _QUIT for key in pressed):
            loop.remove_reader(keyboard)
            task.cancel()

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, read)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


# What is seen


def screen(out: console.Output, target: str, view: View | None, away: SlotcarError | None) -> RenderableType:
    """The last view, cut to the size of the terminal, and whether the server is away since."""
    head = _head(target, view, away)
    if view is None:
        return console.lines(*head)
    slots, *others = _parts(view)
    part = max(_LEAST_ROWS, (out.height - _FIXED_LINES) // (len(others) + 2))
    left = out.height - _FIXED_LINES - part * (len(others) + 1)
    parts: list[RenderableType] = [*head, "", out.fitted(slots.first(max(_LEAST_ROWS, left)))]
    for rows in others:
        parts += ["", out.fitted(rows.first(part))]
    return console.lines(*parts, "", *(tables.event(event, "%H:%M:%S") for event in view.events[-part:]))


def _head(target: str, view: View | None, away: SlotcarError | None) -> tuple[str, ...]:
    status = f"away: {away.message}" if away is not None else "up"
    if view is None:
        return (f"{target}  {status}",)
    version = view.snapshot.layout.version
    return (
        f"{target}  {status}",
        f"epoch {version.epoch}  generation {version.generation}",
        "",
        *tables.bars(view.capacity),
        *tables.capacity(view.capacity),
    )


def _parts(view: View) -> tuple[Rows, ...]:
    """Slots and sessions, and what else there is something of."""
    pins = tables.pins_of(view.sessions, view.snapshot.layout)
    more = (tables.outside(view.snapshot), tables.undone(view.undone))
    shown = (tables.slots(view.snapshot, pins), tables.sessions(view.sessions))
    return (*shown, *(rows for rows in more if rows.rows))
