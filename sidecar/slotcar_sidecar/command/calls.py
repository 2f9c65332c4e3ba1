"""What the verbs that call a server share: --target and --json, how a refusal is shown, and what ends a long run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
import stat
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import click
import slotcar_client
from slotcar_client import CallCancelled, ShuttingDown, SlotcarError, Unavailable, aio

from slotcar_sidecar.command import console
from slotcar_sidecar.command.shown import credentials

Command = Callable[..., Any]

GONE = (Unavailable, ShuttingDown, CallCancelled)
"""What a call raises while a server ends, and when there is none."""


class Seconds(click.FloatRange):
    """A number in a range; "nan" is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return found


def calls_server(command: Command) -> Command:
    """Connects and calls `command(client, out, …)`; a refusal ends the process with 1."""

    @functools.wraps(command)
    def wrapper(target: str | None, as_json: bool, **arguments: Any) -> None:
        out = console.Output(as_json)
        with usage():
            client = slotcar_client.connect(target, credentials=credentials())
        with _refusals(out, client.target), client:
            command(client, out, **arguments)

    return server_options("Print one JSON value.")(wrapper)


def follows_server(timeout_seconds: float) -> Callable[[Command], Command]:
    """The same for a coroutine with an asyncio client, which goes on until somebody ends it; that is no failure."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(target: str | None, as_json: bool, **arguments: Any) -> None:
            out = console.Output(as_json)

            async def follow() -> None:
                with usage():
                    client = aio.connect(target, timeout_seconds=timeout_seconds, credentials=credentials())
                with _refusals(out, client.target):
                    async with client:
                        await command(client, out, **arguments)

            asyncio.run(_until_ended(follow()))

        return server_options("Print JSON objects, one a line.")(wrapper)

    return decorate


def absolute(source: str) -> str:
    """The source as the server needs it: a path becomes absolute, a URI stays."""
    return source if "://" in source else str(Path(source).absolute())


def server_options(json_help: str) -> Callable[[Command], Command]:
    """--target and --json."""

    def decorate(command: Command) -> Command:
        command = click.option("--json", "as_json", is_flag=True, help=json_help)(command)
        return click.option("--target", help="Address of the sidecar. [env var: SLOTCAR_TARGET]")(command)

    return decorate


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """A target that cannot be one is wrong usage."""
    try:
        yield
    except SlotcarError as error:
        raise click.UsageError(error.message) from error


@contextlib.contextmanager
def _refusals(out: console.Output, target: str) -> Iterator[None]:
    try:
        yield
    except SlotcarError as error:
        out.refusal(error)
        if isinstance(error, Unavailable):
            out.hint(f"Does `slotcar serve` listen at {target}? --target or SLOTCAR_TARGET says where.")
        sys.exit(1)


async def _until_ended(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or to Ctrl-C, SIGTERM, or the moment when nobody reads our output any more."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    pipe = _pipe()
    if pipe is not None:
        # Our end of a pipe becomes "readable" only when the other end is closed.
        loop.add_reader(pipe, lambda: (loop.remove_reader(pipe), task.cancel()))
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _pipe() -> int | None:
    """Standard output, if it is a pipe."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):
            return sys.stdout.fileno()
    return None
