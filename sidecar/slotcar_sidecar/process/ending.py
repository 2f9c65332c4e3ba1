"""Ends the server: what is in flight is served, nobody can hold it up, and it ends in time whatever hangs."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Collection

from grpc import aio

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.call import CALL
from slotcar_sidecar.core.errors import ShuttingDown
from slotcar_sidecar.ops.audit import audit
from slotcar_sidecar.process.reload import Reloads
from slotcar_sidecar.ring.rings import Rings
from slotcar_sidecar.rpc.health import Health, Phase

__all__ = [
    "Stop",
    "catch_signals",
    "close_connections",
    "end_chores",
    "end_tasks",
    "ignore_signals",
    "leave",
    "shut_down",
]

_log = logging.getLogger("slotcar")

_ENDING = (signal.SIGTERM, signal.SIGINT)
_QUIET_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
# After the deadline, for all that is closed: longer than all of it takes, unless something hangs.
_LAST_SECONDS = 10.0


class Stop:
    """The wish that the server ends. Invariant: it is never taken back, and its deadline only comes nearer.

    A thread ends the process after the deadline, as a load from a disk that hangs, say, cannot be interrupted.
    """

    def __init__(self, seconds: float, health: Health) -> None:
        """seconds: the time to serve on, unless whoever asks says less. `health` is told when it is asked for.

        Before anything is served there is no time to serve on.
        """
        self._seconds = seconds
        self._health = health
        self._last_resort: threading.Timer | None = None
        self.asked = asyncio.Event()
        self.deadline = math.inf

    def ask(self, seconds: float | None = None) -> float:
        """Returns the seconds that are left."""
        now = time.monotonic()
        if self._health.phase is Phase.STARTING:
            seconds = 0.0
        deadline = now + (self._seconds if seconds is None else seconds)
        if deadline < self.deadline:
            self.deadline = deadline
            self._end_after(deadline - now + _LAST_SECONDS)
        if not self.asked.is_set():
            audit("shutdown", reason=CALL.get().method or "a signal")
        self.asked.set()
        self._health.end()
        return max(0.0, self.deadline - now)

    def check(self) -> None:
        """Raises ShuttingDown once it is asked for."""
        if self.asked.is_set():
            raise ShuttingDown

    def _end_after(self, seconds: float) -> None:
        if self._last_resort is not None:
            self._last_resort.cancel()
        self._last_resort = threading.Timer(seconds, _leave_late)
        self._last_resort.daemon = True
        self._last_resort.start()


def catch_signals(stop: Stop, reloads: Reloads) -> None:
    """SIGTERM and SIGINT ask for the end, SIGHUP for a reload, in the running loop."""
    loop = asyncio.get_running_loop()
    for number in _ENDING:
        loop.add_signal_handler(number, stop.ask)
    loop.add_signal_handler(signal.SIGHUP, reloads.all)


def ignore_signals() -> None:
    """Another one must not spoil the end."""
    loop = asyncio.get_running_loop()
    for number in (*_ENDING, signal.SIGHUP):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


async def shut_down(server: aio.Server, cache: AdapterCache, rings: Rings, stop: Stop) -> bool:
    """Takes no new sessions or loads, serves until no Forward has come for a moment or the time is over, and closes.

    Returns whether every connection could be closed.
    """
    start = time.monotonic()
    fields = {"sessions": len(cache.sessions), "deadline_seconds": round(stop.deadline - start, 1)}
    _log.info("shutting down", extra={"fields": fields})
    cache.shut_down()
    while len(cache.sessions) and (now := time.monotonic()) < stop.deadline:
        if not cache.forwards_in_flight and now - max(cache.last_forward_at, start) > _QUIET_SECONDS:
            break
        await asyncio.sleep(_QUIET_SECONDS / 10)
    await cache.flush()
    rings.close()
    cache.close()
    return await close_connections(server)


async def close_connections(server: aio.Server) -> bool:
    """False when gRPC waits for a peer that takes nothing of what was sent to it: it does so without a limit."""
    stop = asyncio.ensure_future(server.stop(_CLOSE_SECONDS))
    _, late = await asyncio.wait([stop], timeout=2 * _CLOSE_SECONDS)
    if late:
        _log.warning("a client takes nothing of what was sent to it: its connection ends with the process")
    return not late


async def end_chores(chores: Collection[asyncio.Task[None]]) -> None:
    """Cancels them, and gives them the time to end."""
    for chore in chores:
        chore.cancel()
    await asyncio.wait(chores, timeout=_CLOSE_SECONDS)


async def end_tasks() -> None:
    """Lets what still runs come to its end: gRPC logs as a fault what the loop would cancel."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)


def leave() -> None:
    """Ends the process as it is, with 0: gRPC's and the interpreter's end would wait for what does not end."""
    logging.shutdown()
    os._exit(0)


def _leave_late() -> None:
    """In a thread of its own, as the event loop may be what hangs."""
    _log.error("the time is over: what still runs ends with the process")
    leave()
