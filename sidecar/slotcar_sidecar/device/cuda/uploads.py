"""Fills of slots: through pinned memory, on streams that no Forward's waits for, and that wait for none.

Invariant: one half of the pinned memory is written while the other is copied; `fill` returns when all is in the slot.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import cycle

import torch
from torch import Tensor

from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.site import Leaf
from slotcar_sidecar.device.cuda.machine import Event, Machine
from slotcar_sidecar.device.cuda.slots import DeviceSlots
from slotcar_sidecar.device.leaves import NOTHING, LeafArrays, LeafValues, Part, SlotParts, leaf_values
from slotcar_sidecar.device.weights import HostTensors, padded_rank

__all__ = ["Uploads"]

_ALIGNMENT = 64


class Uploads:
    """Fills of different slots run side by side, each with a stream and pinned memory of its own."""

    def __init__(self, machine: Machine, slots: DeviceSlots, poison: bool) -> None:
        self._machine = machine
        self._slots = slots
        self._poison = poison
        self._idle: deque[_Upload] = deque()

    def fill(self, slot: SlotId, weights: HostTensors, parts: SlotParts) -> None:
        """Writes all leaves, and their ranks and scales."""
        try:
            upload = self._idle.pop()
        except IndexError:
            upload = _Upload(self._machine, self._slots, self._poison)
        padded = padded_rank(weights.adapter, self._slots.max_rank)
        for leaf, values in leaf_values(self._slots.model, weights):
            of_leaf = parts.get(leaf.name, (NOTHING,) * leaf.experts)
            upload.write(slot, padded, leaf, values, of_leaf)
        upload.finish()
        self._idle.append(upload)


class _Half:
    """A part of the pinned memory, and when what was last written there has been copied."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used = 0
        self.copied: Event | None = None

    def begin(self) -> None:
        if self.copied is not None:
            self.copied.wait()
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start, size = self._used, math.prod(shape) * dtype.itemsize
        self._used = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        return self._memory[start : start + size].view(dtype).view(shape)


class _Upload:
    def __init__(self, machine: Machine, slots: DeviceSlots, poison: bool) -> None:
        self._slots = slots
        self._poison = poison
        self._stream = machine.stream()
        most = max(_leaf_bytes(slots.arrays[leaf.name]) for leaf in slots.model.leaves)
        self._halves = [_Half(machine.pinned((most,), torch.uint8)) for _ in range(2)]
        self._next = cycle(self._halves)

    def write(self, slot: SlotId, padded: int, leaf: Leaf, values: LeafValues, parts: tuple[Part, ...]) -> None:
        """Enqueues the copies of one leaf; the host's part of it is done."""
        half, arrays = next(self._next), self._slots.arrays[leaf.name]
        half.begin()
        staged = _staged(half, arrays, padded)
        staged.fill(0, padded, values)
        ranks, scales = half.take((len(parts),), torch.int32), half.take((len(parts),), torch.float32)
        ranks.copy_(torch.tensor([part.rank for part in parts]))
        scales.copy_(torch.tensor([part.scale for part in parts], dtype=torch.float64))
        with self._stream.current():
            written = zip(arrays.written(slot, padded, values), staged.written(0, padded, values), strict=True)
            for (to, _), (here, _) in written:
                to.copy_(here, non_blocking=True)
            self._slots.ranks[leaf.name][slot].copy_(ranks, non_blocking=True)
            self._slots.scales[leaf.name][slot].copy_(scales, non_blocking=True)
            if self._poison:
                arrays.poison(slot, padded, values, math.nan)
        half.copied = self._stream.event()

    def finish(self) -> None:
        """Returns once everything is in the slot."""
        self._stream.event().wait()


def _leaf_bytes(arrays: LeafArrays) -> int:
    """The most that `_staged` and the ranks and scales of a leaf take."""
    tensors = [tensor[0] for tensor in (arrays.a, arrays.b, arrays.vectors) if tensor is not None]
    experts = arrays.b.shape[1] if arrays.b.dim() == 4 else 1
    return sum(tensor.numel() * tensor.itemsize + _ALIGNMENT for tensor in tensors) + 2 * (4 * experts + _ALIGNMENT)


def _staged(half: _Half, arrays: LeafArrays, padded: int) -> LeafArrays:
    """A slot's arrays of one leaf in the half, without what lies above the padded rank."""
    a, b = list(arrays.a.shape), list(arrays.b.shape)
    a[-1 if arrays.is_embedding else -2] = b[-2] = padded
    vectors = arrays.vectors
    return LeafArrays(
        half.take((1, *a[1:]), arrays.a.dtype),
        half.take((1, *b[1:]), arrays.b.dtype),
        None if vectors is None else half.take((1, *vectors.shape[1:]), torch.float32),
        arrays.is_embedding,
    )
