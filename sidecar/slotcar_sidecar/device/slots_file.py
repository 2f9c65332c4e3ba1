"""The slots file of this epoch: memory that clients may map for reading, and that never changes its size.

It has no name, so that nothing is left of it when the last process that has it is gone.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from functools import partial

from slotcar.shm.mapping import map_file, use_huge_pages
from slotcar.shm.slots import CLOSED_OFFSET, GENERATION_OFFSET, PART, WORD, GpuPlace, SlotsGeometry

from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.sealed_memory import sealed_memory

__all__ = ["SlotsFile"]


class SlotsFile:
    """The words of proto/slotcar/shm/slots.py and, behind them, the weights unless they are in a GPU's memory.

    Only the owner's thread publishes.
    """

    def __init__(self, geometry: SlotsGeometry, epoch: str, gpu: GpuPlace | None = None) -> None:
        """`gpu` is where the weights are, of a geometry on a GPU. Raises CapacityExceeded."""
        self.geometry = geometry
        mapped = partial(map_file, writable=True)
        self.descriptor, self.memory = sealed_memory("slotcar-slots", geometry.total_bytes, mapped, writable=False)
        weakref.finalize(self, os.close, self.descriptor)
        # One store for each word: struct.pack_into would show readers a zero first.
        self._words = self.memory.cast("Q")
        self._mods = [0] * geometry.slots
        header = geometry.header(epoch)
        self.memory[: len(header)] = header
        if gpu is not None:
            gpu.write(self.memory)
        self._with_huge_pages: set[SlotId] = set()

    def publish(self, layout: Layout) -> None:
        """Tells every reader which slots began to change, before any of their bytes does."""
        for slot, (known, now) in enumerate(zip(self._mods, layout.slots, strict=True)):
            if now.mod_generation != known:
                self._mods[slot] = now.mod_generation
                self._words[self.geometry.mod_offset(slot) // WORD.size] = now.mod_generation
        self._words[GENERATION_OFFSET // WORD.size] = layout.generation

    def use_huge_pages(self, slot: SlotId) -> None:
        """Gives a slot huge pages before it is filled for the first time, where the system has some."""
        if slot not in self._with_huge_pages:
            self._with_huge_pages.add(slot)
            start = self.geometry.slot_offset(slot)
            use_huge_pages(self.memory, start, start + self.geometry.slot_bytes)

    def write_parts(self, slot: SlotId, parts: Iterable[tuple[int, float, int]]) -> None:
        """Writes rank, scale and flags of each leaf's experts, in the order of the model's leaves."""
        start = self.geometry.part_offset(slot, 0)
        data = b"".join([PART.pack(*part) for part in parts])
        self.memory[start : start + len(data)] = data

    def close(self) -> None:
        """Tells every reader that nobody looks after the slots any more. The memory stays as long as it is mapped."""
        self._words[CLOSED_OFFSET // WORD.size] = 1
