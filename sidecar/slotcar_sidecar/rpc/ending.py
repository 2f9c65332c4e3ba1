"""Ends a stream that waits for its peer when the server closes, so that the peer hears of it first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from slotcar_sidecar.core.errors import ShuttingDown


@asynccontextmanager
async def ended_by(closing: asyncio.Event) -> AsyncIterator[None]:
    """Raises ShuttingDown in the body, wherever it waits, when `closing` is set."""
    body = asyncio.current_task()
    assert body is not None
    watch = asyncio.create_task(closing.wait())

    def end(watch: asyncio.Task[Any]) -> None:
        if not watch.cancelled():
            body.cancel()

    watch.add_done_callback(end)
    try:
        yield
    except asyncio.CancelledError:
        if not watch.done():
            raise
        body.uncancel()
        raise ShuttingDown from None
    finally:
        watch.remove_done_callback(end)
        watch.cancel()
