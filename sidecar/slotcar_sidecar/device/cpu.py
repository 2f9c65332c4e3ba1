"""Slots in the memory of the CPU, filled from host weights and computed with by slotcar's kernel.

Invariant: after a fill the slot has its adapter's bytes, cast to the slot dtype, and zeros from each rank up to
the padded rank; a prepared batch keeps the ranks and scales that it was prepared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from slotcar.shm.slots import EPOCH_BYTES, LeafShape, SlotsGeometry
from slotcar_kernels import forward, native
from slotcar_kernels.buffers import DTYPES
from slotcar_kernels.forward import BadAux, NeedsBase, PartSlots, Prepared, SiteCall
from slotcar_kernels.native import backend as kernel_backend
from slotcar_kernels.plan import Plan, plan_rows
from slotcar_kernels.sites import SiteSlots
from torch import Tensor

from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.ports import Batch, HostAdapter
from slotcar_sidecar.core.site import Leaf
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.device.fits import Fits
from slotcar_sidecar.device.leaves import NOTHING, LeafArrays, SlotParts, flags_of, leaf_values, parts_of, slot_holds
from slotcar_sidecar.device.matrices import to_matrix, to_tensor, to_tensor_or_none
from slotcar_sidecar.device.slots_file import SlotsFile
from slotcar_sidecar.device.weights import host_tensors, padded_rank

__all__ = ["CpuBatch", "CpuDevice", "kernel_backend"]


@dataclass(frozen=True, slots=True, eq=False)
class CpuBatch:
    """A prepared Forward: each execution reads the bytes of its items, and the slots, as they are then.

    `outputs` has one matrix per item, which an execution writes.
    """

    plan: Plan
    forward: Prepared
    outputs: tuple[Matrix, ...]


class CpuDevice:
    """S slots; each has, per leaf, A, Bᵀ and vectors as slotcar.shm.slots says, in the epoch's slots file.

    With `poison`, whatever no fill has written is NaN, so that reading the wrong place shows.
    """

    kernel = native.best_isa() or "torch"
    """The instructions that the kernel uses, or "torch" when it runs without its library."""

    def __init__(
        self,
        slots: int,
        max_rank: int,
        slot_dtype: str = "float32",
        poison: bool = False,
        epoch: str = "0" * EPOCH_BYTES,
    ) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.slot_dtype = slot_dtype
        self._dtype = DTYPES[slot_dtype]
        self._poison = poison
        self._epoch = epoch
        self._file: SlotsFile | None = None
        self._model: ModelSpec | None = None
        self._fits: Fits | None = None
        self._arrays: dict[str, LeafArrays] = {}  # by the leaf's name
        # Per slot; a fill replaces its slot's parts, and only fills of different slots run at one time.
        self._parts: list[SlotParts] = [{} for _ in range(slots)]

    def shape(self, model: ModelSpec) -> None:
        """Makes the slots for `model`; without poison, memory is touched only when a slot is filled."""
        assert self._model is None, "a device is shaped once"
        shapes = [
            LeafShape(leaf.in_features, leaf.out_features, leaf.site.experts, leaf.site.kind == "embedding")
            for leaf in model.leaves
        ]
        geometry = SlotsGeometry(self.slots, self.max_rank, self.slot_dtype, shapes)
        file = SlotsFile(geometry, self._epoch)
        weights = torch.frombuffer(file.memory, dtype=self._dtype, offset=geometry.weights_offset)
        if self._poison:
            weights.fill_(math.nan)
        memory = weights, torch.frombuffer(file.memory, dtype=torch.float32, offset=geometry.weights_offset)
        for index, leaf in enumerate(model.leaves):
            arrays = self._arrays[leaf.name] = LeafArrays.of_slots(memory, geometry, index)
            if self._poison and arrays.vectors is not None:
                arrays.vectors.fill_(math.nan)
        self._file, self._model, self._fits = file, model, Fits(model, self.max_rank, self.slot_dtype)

    @property
    def file(self) -> SlotsFile | None:
        """What clients of the direct plane map; None before `shape`."""
        return self._file

    def slot_bytes(self) -> int:
        """Size of one slot over all sites, in bytes; 0 before `shape`."""
        return self._model.slot_bytes(self.max_rank, self._dtype.itemsize) if self._model is not None else 0

    def publish(self, layout: Layout) -> None:
        """Tells readers in other processes which slots begin to change."""
        if self._file is not None:
            self._file.publish(layout)

    def close(self) -> None:
        """Tells readers in other processes that nobody looks after the slots any more. Idempotent."""
        if self._file is not None:
            self._file.close()

    def losses(self, weights: HostAdapter) -> tuple[str, ...]:
        """What a cast to the slot dtype makes zero, for people. Raises what `check` raises."""
        assert self._fits is not None, "a device is shaped before it is filled"
        return self._fits.losses(weights)

    def check(self, weights: HostAdapter) -> None:
        """Raises AdapterInvalid unless the adapter fits the model, and its values fit the slot dtype."""
        assert self._fits is not None, "a device is shaped before it is filled"
        self._fits.check(weights)

    def fill(self, slot: SlotId, weights: HostAdapter) -> None:
        """Writes A and Bᵀ, cast to the slot dtype, into a slot, and zeros from each rank up to the padded rank.

        The padded rank is the adapter's largest, rounded up to a multiple of 16, at most `max_rank`. A leaf that the
        adapter does not target is zero up to it, with rank 0; vectors are written where the adapter has some. Batches
        prepared before keep their ranks and scales. Raises what `check` raises, and has written nothing then.
        """
        self.check(weights)
        assert self._file is not None
        assert self._model is not None
        host = host_tensors(weights)
        parts, padded = parts_of(self._model, host), padded_rank(host.adapter, self.max_rank)
        self._parts[slot] = {}
        self._file.use_huge_pages(slot)
        written = (parts.get(leaf.name, (NOTHING,) * leaf.experts) for leaf in self._model.leaves)
        self._file.write_parts(slot, chain.from_iterable(written))
        for leaf, values in leaf_values(self._model, host):
            self._arrays[leaf.name].fill(slot, padded, values)
            if self._poison:
                self._arrays[leaf.name].poison(slot, padded, values, math.nan)
        self._parts[slot] = parts

    def prepare(
        self, entries: Sequence[tuple[SlotId | None, int]], items: Sequence[ForwardItem], rank: int = 0
    ) -> CpuBatch:
        """Groups the rows by slot and the items by their x, and captures ranks and scales as they are now.

        Raises RequestInvalid for an item that needs the base model's output and has none.
        """
        plan = plan_rows(entries)
        inputs = {key: to_tensor_or_none(x) for key, x in {id(item.x): item.x for item in items}.items()}
        used = [segment.slot for segment in plan.segments]
        calls = [
            SiteCall(
                self._part_slots(item.site, used, rank),
                self._out(item, plan.rows),
                inputs[id(item.x)],
                to_tensor_or_none(item.base),
                to_tensor_or_none(item.aux),
            )
            for item in items
        ]
        try:
            prepared = forward.prepare(plan, calls)
        except NeedsBase as error:
            wanted = "the base model's output, which an adapter of the mapping needs here"
            raise RequestInvalid(f"items[{error.index}].aux", found="nothing", wanted=wanted) from None
        outputs = [item.out or to_matrix(call.out) for item, call in zip(items, calls, strict=True)]
        return CpuBatch(plan, prepared, tuple(outputs))

    def execute(self, batch: Batch) -> tuple[Matrix, ...]:
        """Computes one [rows, out] matrix per item, in the item's dtype: base + delta, or the delta.

        Raises RequestInvalid for ids or experts that there are not; then nothing was written.
        """
        assert isinstance(batch, CpuBatch)
        try:
            batch.forward()
        except BadAux as error:
            raise RequestInvalid(f"items[{error.index}].aux", found=error.found, wanted=error.wanted) from None
        return batch.outputs

    def matches(self, slot: SlotId, weights: HostAdapter) -> bool:
        """Whether the slot is, bit for bit, what a fill with `weights` writes (invariant I1)."""
        assert self._model is not None
        return slot_holds(slot, self._arrays, self._parts[slot], (self._model, self.max_rank), host_tensors(weights))

    def _out(self, item: ForwardItem, rows: int) -> Tensor:
        """Where the item's result goes: where it says, or memory of its own."""
        if item.out is not None:
            return to_tensor(item.out)
        assert self._model is not None
        return torch.empty(rows, self._model.rank_features(item.site)[1], dtype=DTYPES[item.dtype])

    def _part_slots(self, site: str, used: Sequence[int], rank: int) -> list[PartSlots]:
        assert self._model is not None
        leaves = self._model.leaves_of[site]
        return [self._leaf_slots(self._model.leaves[index], used, rank) for index in leaves]

    def _leaf_slots(self, leaf: Leaf, used: Sequence[int], rank: int) -> PartSlots:
        """A leaf as a rank sees it."""
        assert self._model is not None
        arrays, experts = self._arrays[leaf.name].of_rank(self._model, leaf, rank), leaf.experts
        ranks, scales, flags = [0] * (self.slots * experts), [0.0] * (self.slots * experts), [0] * self.slots
        for slot in used:
            for expert, part in enumerate(self._parts[slot].get(leaf.name, ())):
                ranks[slot * experts + expert], scales[slot * experts + expert] = part.rank, part.scale
                flags[slot] = flags_of(part, leaf, rank)
        return PartSlots(SiteSlots(arrays.a, arrays.b, ranks, scales, arrays.is_embedding), arrays.vectors, flags)
