"""Memory that other processes may map, and whose size nobody can change: a reader of it cannot be made to fault.

It has no name, so that nothing is left of it when the last process that has it is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import TypeVar

from slotcar_sidecar.core.errors import CapacityExceeded

Memory = TypeVar("Memory")

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in the fcntl module


def sealed_memory(name: str, size: int, mapped: Callable[[int, int], Memory], *, writable: bool) -> tuple[int, Memory]:
    """A descriptor of `size` bytes of zeros and what `mapped` makes of it and the size: this process's mapping.

    Without `writable`, whoever gets the descriptor can map it for reading only. Raises CapacityExceeded, also for more
    than the machine's memory, which the kernel would promise and then kill for.
    """
    descriptor = -1
    try:
        if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        memory = mapped(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | (0 if writable else _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise CapacityExceeded(
            f"this machine has no {size} bytes of shared memory for {name}: {error.strerror}", wanted=size
        ) from error
    return descriptor, memory
