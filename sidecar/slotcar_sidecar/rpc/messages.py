"""The messages of a call that has many, which a caller who leaves cuts short nowhere inside gRPC.

gRPC cancels the task of a call whose caller leaves, wherever it waits, and grpcio (1.80 to 1.85) frees what a read or a
write holds only when that ends: some hundred bytes were lost with each stream that is given up, and a page with them.
Invariant: what gRPC began for a caller who left ends by itself, as it does at once. A read is cut short only when this
side ends the call: by its shutdown, for a right that is taken, or for silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, TypeVar

from grpc import aio

T = TypeVar("T")


class Messages:
    """Of one call. `run` has what reads and writes them."""

    def __init__(self, context: aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._is_in_grpc = False
        self._has_left = False

    async def run(self, body: Coroutine[Any, Any, T]) -> T:
        """What `body` returns. It is cancelled when the caller leaves, in gRPC not before that is done."""
        task = asyncio.create_task(body)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._has_left = True
            if not self._is_in_grpc:
                task.cancel()
            await asyncio.wait((task,))
            raise

    async def each(self) -> AsyncIterator[Any]:
        """The requests, as they come."""
        while (request := await self._done(self._context.read())) is not aio.EOF:
            yield request

    async def write(self, response: Any) -> None:
        await self._done(self._context.write(response))

    async def _done(self, operation: Awaitable[T]) -> T:
        """Raises CancelledError when the caller has left."""
        self._is_in_grpc = True
        try:
            result = await operation
        except aio.InternalError:  # so gRPC calls what a connection that ends leaves undone
            raise asyncio.CancelledError from None
        finally:
            self._is_in_grpc = False
        if self._has_left:
            raise asyncio.CancelledError
        return result
