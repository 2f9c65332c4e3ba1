"""Says when to look at files: at once, when asked, after each change in their folders has calmed down, now and then.

The last is for what no notice comes of: a folder that is not there yet, links that lead elsewhere, file systems of
other machines, or a kernel that has no watch left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from pathlib import Path

from watchfiles import awatch

_CALM_MILLISECONDS = 100
_MOST_MILLISECONDS = 2000


async def looks(
    files: Callable[[], Iterable[Path]], poll_seconds: float, asked: asyncio.Event
) -> AsyncGenerator[None, None]:
    """Goes on for ever, with the files that `files` names after each look; `asked` is cleared when it is obeyed.

    Of many changes in a short time there is one look, two seconds after the first at most.
    """
    while True:
        asked.clear()
        yield
        folders = _identities(files())
        try:
            async with contextlib.aclosing(
                awatch(
                    *(folder for folder, identity in folders.items() if identity),
                    watch_filter=None,
                    recursive=False,
                    step=_CALM_MILLISECONDS,
                    debounce=_MOST_MILLISECONDS,
                    rust_timeout=max(1, round(poll_seconds * 1000)),
                    yield_on_timeout=True,
                    stop_event=asked,
                )
            ) as changes:
                async with _begun(changes) as first:
                    # What happened before the watch began.
                    yield
                    await first
                yield
                async for _ in changes:
                    yield
                    if _identities(files()) != folders:
                        break
        except (OSError, RuntimeError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(poll_seconds):
                    await asked.wait()


@contextlib.asynccontextmanager
async def _begun(changes: AsyncGenerator[object, None]) -> AsyncIterator[asyncio.Future[object]]:
    """The first change, None when there is no more; a watch begins with the question for it."""
    first = asyncio.ensure_future(anext(changes, None))
    try:
        await asyncio.sleep(0)
        yield first
    finally:
        if not first.done():
            first.cancel()
            await asyncio.wait([first])


def _identities(files: Iterable[Path]) -> dict[Path, tuple[int, int] | None]:
    """Of the files' folders: a watch goes on with a folder that has been moved away."""
    return {folder: _identity(folder) for folder in {file.parent for file in files}}


def _identity(folder: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, ValueError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None
