"""The slots' memory on the GPU, as fills write it and as kernels see it.

Invariant: addresses stay for the life of the process; kernels read ranks and scales where they lie beside the slots.
"""

from __future__ import annotations

import math

import torch
from slotcar.shm.slots import LeafShape, SlotsGeometry
from slotcar_kernels.buffers import DTYPES
from slotcar_kernels.triton import SlicePart
from torch import Tensor

from slotcar_sidecar.core.errors import CapacityExceeded
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.device.cuda.machine import Machine
from slotcar_sidecar.device.leaves import LeafArrays

__all__ = ["DeviceSlots"]


class DeviceSlots:
    """S slots for a model; each has, per leaf, A, Bᵀ and vectors, and a rank and a scale for each of its experts."""

    def __init__(self, model: ModelSpec, shape: tuple[int, int, str], machine: Machine, poison: bool) -> None:
        """shape: number of slots, largest rank, dtype. Raises CapacityExceeded."""
        self.model, self.device = model, machine.device
        self.count, self.max_rank, dtype = shape
        leaves = [
            LeafShape(leaf.in_features, leaf.out_features, leaf.site.experts, leaf.site.kind == "embedding")
            for leaf in model.leaves
        ]
        self.geometry = geometry = SlotsGeometry(self.count, self.max_rank, dtype, leaves, on_gpu=True)
        needed = geometry.weights_bytes
        try:
            self.memory = machine.slots_memory(needed)
        except torch.OutOfMemoryError:
            message = f"{self.count} slots of {geometry.slot_bytes} bytes are more than the GPU has left"
            raise CapacityExceeded(message, found=needed) from None
        weights, vectors = self.memory.bytes.view(DTYPES[dtype]), self.memory.bytes.view(torch.float32)
        if poison:
            weights.fill_(math.nan)
        self.arrays = {
            leaf.name: LeafArrays.of_slots((weights, vectors), geometry, index)
            for index, leaf in enumerate(model.leaves)
        }
        if poison:
            for arrays in self.arrays.values():
                if arrays.vectors is not None:
                    arrays.vectors.fill_(math.nan)
        self.ranks = {leaf.name: self._table(leaf.experts, torch.int32) for leaf in model.leaves}
        self.scales = {leaf.name: self._table(leaf.experts, torch.float32) for leaf in model.leaves}
        self._parts: dict[tuple[str, int], list[SlicePart]] = {}

    def parts(self, site: str, rank: int) -> list[SlicePart]:
        """A site's parts as a rank computes with them."""
        found = self._parts.get((site, rank))
        if found is None:
            leaves = [self.model.leaves[index] for index in self.model.leaves_of[site]]
            found = self._parts[site, rank] = [
                SlicePart(
                    *self.arrays[leaf.name].of_rank(self.model, leaf, rank)[:2],
                    self.ranks[leaf.name].view(-1),
                    self.scales[leaf.name].view(-1),
                )
                for leaf in leaves
            ]
        return found

    def _table(self, experts: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.count, experts, dtype=dtype, device=self.device)
