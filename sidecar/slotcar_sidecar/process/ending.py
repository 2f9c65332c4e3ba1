"""Ends the server: what is in flight is served, and nobody can hold it up."""

from __future__ import annotations

import asyncio
import logging
import time

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.ring.rings import Rings
from slotcar_sidecar.rpc.server import Rpc

__all__ = ["end_tasks", "shut_down"]

_log = logging.getLogger("slotcar")

_QUIET_SECONDS = 0.5
_CLOSE_SECONDS = 2.0


async def shut_down(rpc: Rpc, cache: AdapterCache, rings: Rings, seconds: float) -> bool:
    """Takes no new sessions or loads, serves until no Forward has come for a moment or the time is over, and closes.

    Returns whether every connection could be closed.
    """
    _log.info("shutting down", extra={"fields": {"sessions": len(cache.sessions), "deadline_seconds": seconds}})
    await rpc.health.tell(alive=True, ready=False)
    cache.shut_down()
    start = time.monotonic()
    deadline = start + seconds
    while len(cache.sessions) and (now := time.monotonic()) < deadline:
        if not cache.forwards_in_flight and now - max(cache.last_forward_at, start) > _QUIET_SECONDS:
            break
        await asyncio.sleep(_QUIET_SECONDS / 10)
    await cache.flush()
    rings.close()
    cache.close()
    are_closed = await _close_connections(rpc)
    if not are_closed:
        _log.warning("a client takes nothing of what was sent to it: its connection ends with the process")
    _log.info("stopped")
    return are_closed


async def _close_connections(rpc: Rpc) -> bool:
    """False when gRPC waits for a peer that takes nothing of what was sent to it: it does so without a limit."""
    stop = asyncio.ensure_future(rpc.server.stop(_CLOSE_SECONDS))
    _, late = await asyncio.wait([stop], timeout=2 * _CLOSE_SECONDS)
    return not late


async def end_tasks() -> None:
    """Lets what still runs come to its end: gRPC logs as a fault what the loop would cancel."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
