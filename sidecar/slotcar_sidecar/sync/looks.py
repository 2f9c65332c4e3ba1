"""Says when to look at a file: at once, after each change in its folder has calmed down, and now and then.

The last is for what no notice comes of: a folder that is not there yet, links that lead elsewhere, file systems of
other machines, or a kernel that has no watch left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from watchfiles import awatch

_CALM_MILLISECONDS = 100
_MOST_MILLISECONDS = 2000


async def looks(path: Path, poll_seconds: float) -> AsyncGenerator[None, None]:
    """Goes on for ever. Of many changes in a short time there is one look, two seconds after the first at most."""
    while True:
        yield
        try:
            async with contextlib.aclosing(
                awatch(
                    path.parent,
                    watch_filter=None,
                    recursive=False,
                    step=_CALM_MILLISECONDS,
                    debounce=_MOST_MILLISECONDS,
                    rust_timeout=max(1, round(poll_seconds * 1000)),
                    yield_on_timeout=True,
                )
            ) as changes:
                # What happened before the watch began.
                yield
                folder = _identity(path.parent)
                async for _ in changes:
                    yield
                    if _identity(path.parent) != folder:
                        break
        except (OSError, RuntimeError):
            await asyncio.sleep(poll_seconds)


def _identity(folder: Path) -> tuple[int, int] | None:
    """A watch goes on with a folder that has been moved away."""
    with contextlib.suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None
