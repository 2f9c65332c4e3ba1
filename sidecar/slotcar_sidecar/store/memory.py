"""Memory for the bytes of an adapter's files, which this process alone has."""

from __future__ import annotations

import contextlib
import mmap
import os

__all__ = ["private_memory", "read_into"]

# Larger ones get pages of their own, which go back to the system when the adapter is dropped. A mapping for each small
# one would use up those that a process may have.
_OWN_PAGES_BYTES = 1 << 20


def private_memory(size: int) -> memoryview:
    """`size` writable bytes. Raises OSError or MemoryError when there are none."""
    if size < _OWN_PAGES_BYTES:
        return memoryview(bytearray(size))
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def read_into(descriptor: int, memory: memoryview, start: int = 0) -> int:
    """Reads a file from `start` until `memory` is full or the file ends; says how many bytes came. Raises OSError."""
    size = 0
    while count := os.preadv(descriptor, [memory[size:]], start + size):
        size += count
    return size
