"""Which bytes of a region's arena are whose: blocks, each at the lowest place that has room for it.

Invariant: no two blocks overlap. A client that calls in a steady pattern gets the same places again and again, so that
what either side prepared for a place is of use again.
"""

from __future__ import annotations

from bisect import insort

from slotcar.shm.region import ALIGNMENT


def aligned(size: int) -> int:
    """The bytes that a tensor of `size` takes: at least one, so that no two tensors begin at one place."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


class Arena:
    """A few dozen blocks in `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._blocks: list[tuple[int, int]] = []

    def take(self, size: int) -> tuple[int, int] | None:
        """(start, end) of a new block; None when no gap is large enough now."""
        start = 0
        for first, end in self._blocks:
            if first - start >= size:
                break
            start = end
        block = start, start + size
        if block[1] > self.size:
            return None
        insort(self._blocks, block)
        return block

    def give_back(self, block: tuple[int, int]) -> None:
        """The block is free."""
        self._blocks.remove(block)
