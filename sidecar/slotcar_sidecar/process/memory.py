"""What the process does with memory that is free: kept for the next large buffer, returned now and then."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc

_TRIM_SECONDS = 20.0


def freeze_imported() -> None:
    """What was imported stays: full collections are short then, and come as soon as there is garbage worth it."""
    gc.freeze()
    gc.collect()


def keep_freed() -> None:
    """Tells glibc to reuse large buffers instead of returning them: messages of megabytes get several times cheaper.

    One arena, or each thread keeps holes of its own between its buffers.
    """
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_arena_max, 1)
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


async def return_freed() -> None:
    """Returns what is free now and then, as glibc itself does not any more; otherwise holes between buffers add up."""
    with contextlib.suppress(OSError, AttributeError):
        trim = ctypes.CDLL("libc.so.6").malloc_trim
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            await asyncio.to_thread(trim, 0)
