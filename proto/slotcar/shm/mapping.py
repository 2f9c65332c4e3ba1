"""Maps a file of shared memory at an address at which the system can give it huge pages, and asks for them.

Weights that are in no cache are read up to a half faster from huge pages. Most systems give shared memory none by
themselves.
"""

from __future__ import annotations

import ctypes
import mmap
import os

__all__ = ["map_file", "use_huge_pages"]

_HUGE_BYTES = 2 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_COLLAPSE = 25  # Linux 6.1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(descriptor: int, size: int, *, writable: bool) -> memoryview:
    """The first `size` bytes of a file, shared, mapped for as long as there is a view of them.

    Raises OSError, and ValueError for no bytes.
    """
    if size < 1:
        raise ValueError("a file of no bytes can not be mapped")
    # Its owner unmaps whatever lies there; the file is put over the part that begins well.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = mmap.mmap(-1, size + _HUGE_BYTES, flags=flags)
    start = _address(reserved)
    skipped = -start % _HUGE_BYTES
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(start + skipped, size, protection, flags, descriptor, 0) != start + skipped:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = memoryview(reserved)[skipped : skipped + size]
    return memory if writable else memory.toreadonly()


def use_huge_pages(memory: memoryview, start: int, stop: int) -> None:
    """Asks for huge pages for [start, stop) of a writable `map_file`, and for what shares one with it; all bytes stay.

    Where the system has none nothing happens. Nobody else may write to [start, stop) meanwhile; what lies around it may
    be read and written.
    """
    first = start // _HUGE_BYTES * _HUGE_BYTES
    last = min(-(-stop // _HUGE_BYTES), len(memory) // _HUGE_BYTES) * _HUGE_BYTES
    if start >= stop or first >= last:
        return
    for at in range(first, last, _HUGE_BYTES):
        mine = max(at, start)
        memory[mine] = memory[mine]  # without any page there is nothing to collapse
    _libc.madvise(_address(memory) + first, last - first, _MADV_COLLAPSE)


def _address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
