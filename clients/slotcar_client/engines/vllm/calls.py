"""The front end's calls of the sidecar's adapter service, by threads that may block and by event loops that may not."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from slotcar_client import effects
from slotcar_client.aio.rpc import AsyncRpc
from slotcar_client.aio.rpc import run as run_async
from slotcar_client.client import address
from slotcar_client.effects import Plan
from slotcar_client.rpc import Rpc

T = TypeVar("T")

# Of each call; a load reads its source, and hashes it, within it.
CALL_SECONDS = 60.0


class Calls:
    """One channel for threads, and one for each event loop; made when they are first needed."""

    def __init__(self, target: str) -> None:
        """Raises RequestInvalid unless the target is one of the three forms, and the credentials fit it."""
        self._address = address(target)
        self._blocking: Rpc | None = None
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncRpc] = weakref.WeakKeyDictionary()

    async def perform(self, plan: Plan[T]) -> T:
        """The result of a plan, without blocking the loop that runs. Raises SlotcarError."""
        loop = asyncio.get_running_loop()
        rpc = self._by_loop.get(loop)
        if rpc is None:
            rpc = self._by_loop[loop] = AsyncRpc(self._address, CALL_SECONDS)
        return await run_async(plan, rpc.perform)

    async def perform_blocking(self, plan: Plan[T]) -> T:
        """The same for `run_blocking`: it blocks and never suspends."""
        if self._blocking is None:
            self._blocking = Rpc(self._address, CALL_SECONDS)
        return effects.run(plan, self._blocking.perform)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends, with or without an event loop around it."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError("a coroutine of the blocking face was suspended")
