"""The verbs for the server process itself: its end, and how much its log says."""

from __future__ import annotations

import asyncio
import contextlib

import click
from slotcar_client import Client, DeadlineExceeded
from slotcar_client.aio import AsyncClient
from slotcar_client.verbs import LOG_LEVELS, MOST_DEADLINE_SECONDS

from slotcar_sidecar.command import console
from slotcar_sidecar.command.calls import GONE, Seconds, calls_server, follows_server

_TIMEOUT_SECONDS = 60.0
_LOOK_SECONDS = 0.1
# What a server takes to close after its deadline, at most, and some more.
_CLOSE_SECONDS = 15.0


@click.command()
@click.option(
    "--deadline",
    "deadline_seconds",
    type=Seconds(0, MOST_DEADLINE_SECONDS),
    help="Let sessions compute for at most this long, in seconds.  [default: what the server is set to]",
)
@click.option("--wait", is_flag=True, help="Return when the server is gone.")
@follows_server(_TIMEOUT_SECONDS)
async def shutdown(client: AsyncClient, out: console.Output, deadline_seconds: float | None, wait: bool) -> None:
    """End the server, as SIGTERM does: it takes nothing new, serves what it has, and exits."""
    epoch = (await client.settings()).version.epoch
    left = await client.shut_down(deadline_seconds)
    if not out.as_json:
        out.line(f"the server shuts down; sessions may compute for {left:g} s")
    if wait:
        await _wait_for_end(client, epoch, left + _CLOSE_SECONDS)
    if out.as_json:
        out.json({"time_left_seconds": left, "ended": wait})
    elif wait:
        out.line("it is gone")


async def _wait_for_end(client: AsyncClient, epoch: str, seconds: float) -> None:
    """Returns when nobody answers, or a later life does. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(*GONE):
                while True:
                    if (await client.settings()).version.epoch != epoch:
                        return
                    await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise DeadlineExceeded(f"the server still answers after {seconds:g} s") from None


@click.command("log-level")
@click.argument("level", required=False, type=click.Choice(LOG_LEVELS))
@calls_server
def log_level(client: Client, out: console.Output, level: str | None) -> None:
    """Show how much the server logs, or change it until its next start, or reload of a file of the level."""
    previous = client.set_log_level(level) if level is not None else client.settings().log_level
    now = level or previous
    if out.as_json:
        out.json({"level": now, "previous": previous})
    else:
        out.line(now if level is None else f"{now}, {previous} before")


COMMANDS = (shutdown, log_level)
