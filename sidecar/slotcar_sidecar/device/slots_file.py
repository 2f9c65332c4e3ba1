"""The slots file of this epoch: memory that clients may map for reading, and that never changes its size.

It has no name, so that nothing is left of it when the last process that has it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable

from slotcar.shm.slots import CLOSED_OFFSET, GENERATION_OFFSET, PART, WORD, SlotsGeometry

from slotcar_sidecar.core.errors import CapacityExceeded
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import Layout

__all__ = ["SlotsFile", "sealed_memory"]

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in the fcntl module


def sealed_memory(name: str, size: int, *, writable: bool) -> tuple[int, mmap.mmap]:
    """A descriptor of `size` bytes of zeros and this process's mapping of them; nobody can change the size.

    Without `writable`, whoever gets the descriptor can map it for reading only. Raises CapacityExceeded.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | (0 if writable else _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise CapacityExceeded(
            f"this machine has no {size} bytes of shared memory for {name}: {error.strerror}", wanted=size
        ) from error
    return descriptor, memory


class SlotsFile:
    """The words of proto/slotcar/shm/slots.py and, behind them, the weights. Only the owner's thread publishes."""

    def __init__(self, geometry: SlotsGeometry, epoch: str) -> None:
        """Raises CapacityExceeded."""
        self.geometry = geometry
        self.descriptor, self.memory = sealed_memory("slotcar-slots", geometry.total_bytes, writable=False)
        self._mods = [0] * geometry.slots
        header = geometry.header(epoch)
        self.memory[: len(header)] = header
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self.memory.madvise(mmap.MADV_HUGEPAGE)

    def publish(self, layout: Layout) -> None:
        """Tells every reader which slots began to change, before any of their bytes does."""
        for slot, (known, now) in enumerate(zip(self._mods, layout.slots, strict=True)):
            if now.mod_generation != known:
                self._mods[slot] = now.mod_generation
                WORD.pack_into(self.memory, self.geometry.mod_offset(slot), now.mod_generation)
        WORD.pack_into(self.memory, GENERATION_OFFSET, layout.generation)

    def write_parts(self, slot: SlotId, parts: Iterable[tuple[int, float]]) -> None:
        """Writes rank and scale of each site, in the order of the model's."""
        start = self.geometry.part_offset(slot, 0)
        data = b"".join([PART.pack(rank, scale) for rank, scale in parts])
        self.memory[start : start + len(data)] = data

    def close(self) -> None:
        """Tells every reader that nobody looks after the slots any more. The memory stays as long as it is mapped."""
        WORD.pack_into(self.memory, CLOSED_OFFSET, 1)
