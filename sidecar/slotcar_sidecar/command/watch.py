"""`slotcar watch`: prints one server whenever it has changed, also over its restarts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click
from slotcar_client import Event, SlotcarError
from slotcar_client.aio import AsyncClient

from slotcar_sidecar.command import console, tables
from slotcar_sidecar.command.calls import follows_server
from slotcar_sidecar.command.following import TIMEOUT_SECONDS, Away, View, follow, interval


@click.command()
@interval
@follows_server(TIMEOUT_SECONDS)
async def watch(client: AsyncClient, out: console.Output, interval_seconds: float) -> None:
    """Print slots, sessions, capacity and events at each change, until Ctrl-C; with --json as an object a line.

    It goes on over restarts of the server. `slotcar top` shows the same on one screen.
    """
    await follow(client, interval_seconds, Changes(out).show)


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
            out.json(plain(view, events))
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


def plain(view: View, events: Sequence[Event]) -> dict[str, Any]:
    """For JSON, with those of the events that are to be told."""
    return {
        "state": "up",
        **dataclasses.asdict(view.snapshot),
        "pins": [dataclasses.asdict(pin) for pin in tables.pins_of(view.sessions, view.snapshot.layout)],
        "sessions": [dataclasses.asdict(session) for session in view.sessions],
        "capacity": dataclasses.asdict(view.capacity),
        "undone": [dataclasses.asdict(entry) for entry in view.undone],
        "events": [dataclasses.asdict(event) for event in events],
    }
