"""Slots in the memory of the CPU, filled from host weights and computed with by slotcar's kernel.

Invariant: after a fill the slot has its adapter's bytes, cast to the slot dtype, and zeros from each rank up to
the padded rank; a prepared batch keeps the ranks and scales that it was prepared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from slotcar_kernels import native
from slotcar_kernels.buffers import DTYPES, buffer_from_tensor, tensor_from_buffer
from slotcar_kernels.cpu import lora_forward
from slotcar_kernels.native import backend as kernel_backend
from slotcar_kernels.plan import Plan, plan_rows
from slotcar_kernels.sites import SiteSlots
from torch import Tensor

from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.core.errors import CapacityExceeded
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.ports import Batch, HostAdapter
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.device.weights import check_range, host_tensors, padded_rank

__all__ = ["CpuBatch", "CpuDevice", "SharedInput", "kernel_backend"]

_SLOT_STEP = 32  # elements between slots are a multiple of it, so that BLAS sums alike in each slot
_BITS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True, slots=True, eq=False)
class SharedInput:
    """The items of a batch, by their indices, that have one input x."""

    x: Tensor
    indices: tuple[int, ...]
    sites: tuple[SiteSlots, ...]
    bases: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CpuBatch:
    """A prepared Forward: it reads the bytes of its items, and the slots, when it is executed."""

    plan: Plan
    inputs: tuple[SharedInput, ...]
    items: int


class CpuDevice:
    """S slots; each has, per site, A [max_rank, in] and Bᵀ [max_rank, out] of `slot_dtype`.

    With `poison`, whatever no fill has written is NaN, so that reading the wrong place shows.
    """

    kernel = native.best_isa() or "torch"
    """The instructions that the kernel uses, or "torch" when it runs without its library."""

    def __init__(self, slots: int, max_rank: int, slot_dtype: str = "float32", poison: bool = False) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.slot_dtype = slot_dtype
        self._dtype = DTYPES[slot_dtype]
        self._poison = poison
        self._model: ModelSpec | None = None
        self._a: dict[str, Tensor] = {}
        self._b: dict[str, Tensor] = {}
        # Per slot, by site; a fill replaces its slot's mapping, and only fills of different slots run at one time.
        self._parts: list[Mapping[str, SiteLora]] = [{} for _ in range(slots)]

    def shape(self, model: ModelSpec) -> None:
        """Allocates the slots for `model`; without poison, memory is touched only when a slot is filled."""
        assert self._model is None, "a device is shaped once"
        try:
            a = {site.name: self._empty_slots(site.in_features) for site in model.sites}
            b = {site.name: self._empty_slots(site.out_features) for site in model.sites}
        except (MemoryError, RuntimeError) as error:
            raise CapacityExceeded(f"this machine has no memory for {self.slots} slots of this model") from error
        self._a, self._b, self._model = a, b, model

    def slot_bytes(self) -> int:
        """Size of one slot over all sites, in bytes; 0 before `shape`."""
        columns = sum(slots.shape[2] for slots in (*self._a.values(), *self._b.values()))
        return self.max_rank * columns * self._dtype.itemsize

    def check(self, weights: HostAdapter) -> None:
        """Raises AdapterInvalid unless the adapter fits the model, and its values fit the slot dtype."""
        assert self._model is not None, "a device is shaped before it is filled"
        weights.adapter.check_fits(self._model, self.max_rank)
        check_range(host_tensors(weights), self.slot_dtype)

    def fill(self, slot: SlotId, weights: HostAdapter) -> None:
        """Writes A and Bᵀ, cast to the slot dtype, into a slot, and zeros from each rank up to the padded rank.

        The padded rank is the adapter's largest, rounded up to a multiple of 16, at most `max_rank`. A site that the
        adapter does not target is zero up to it, with rank 0. Batches prepared before keep their ranks and scales.
        Raises what `check` raises, and has written nothing then.
        """
        self.check(weights)
        host = host_tensors(weights)
        parts = {part.site: part for part in host.adapter.parts}
        padded = padded_rank(host.adapter, self.max_rank)
        self._parts[slot] = {}
        for site in self._a:
            rank = parts[site].rank if site in parts else 0
            for rows in (self._a[site][slot], self._b[site][slot]):
                rows[rank:padded].zero_()
                if self._poison:
                    rows[padded:].fill_(math.nan)
            if rank:
                self._a[site][slot, :rank].copy_(host.a[site])
                self._b[site][slot, :rank].copy_(host.b[site].t())
        self._parts[slot] = parts

    def prepare(self, entries: Sequence[tuple[SlotId | None, int]], items: Sequence[ForwardItem]) -> CpuBatch:
        """Groups the rows by slot and the items by their x, and captures ranks and scales as they are now."""
        plan = plan_rows(entries)
        by_input: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            by_input.setdefault(id(item.x), []).append(index)
        inputs = [
            SharedInput(
                x=_tensor(items[indices[0]].x),
                indices=tuple(indices),
                sites=tuple([self._site_slots(items[index].site, plan) for index in indices]),
                bases=tuple([_tensor_or_none(items[index].base) for index in indices]),
            )
            for indices in by_input.values()
        ]
        return CpuBatch(plan, tuple(inputs), len(items))

    def execute(self, batch: Batch) -> list[Matrix]:
        """Computes one [rows, out_features] matrix per item, in the dtype of its x: base + delta, or the delta."""
        assert isinstance(batch, CpuBatch)
        results: dict[int, Matrix] = {}
        for shared in batch.inputs:
            outs = [torch.empty(batch.plan.rows, site.out_features, dtype=shared.x.dtype) for site in shared.sites]
            lora_forward(batch.plan, shared.x, shared.sites, outs, shared.bases)
            for index, out in zip(shared.indices, outs, strict=True):
                dtype, rows, columns, data = buffer_from_tensor(out)
                results[index] = Matrix(dtype, rows, columns, columns, data)
        return [results[index] for index in range(batch.items)]

    def matches(self, slot: SlotId, weights: HostAdapter) -> bool:
        """Whether the slot is, bit for bit, what a fill with `weights` writes (invariant I1)."""
        host = host_tensors(weights)
        parts = {part.site: part for part in host.adapter.parts}
        padded = padded_rank(host.adapter, self.max_rank)
        return self._parts[slot] == parts and all(
            _holds(slots[site][slot, :padded], rows.get(site))
            for slots, rows in ((self._a, host.a), (self._b, {name: b.t() for name, b in host.b.items()}))
            for site in slots
        )

    def _empty_slots(self, features: int) -> Tensor:
        """[S, R, features], each slot contiguous."""
        stride = -(-self.max_rank * features // _SLOT_STEP) * _SLOT_STEP
        flat = torch.empty(self.slots * stride, dtype=self._dtype)
        if self._poison:
            flat.fill_(math.nan)
        return flat.as_strided((self.slots, self.max_rank, features), (stride, features, 1))

    def _site_slots(self, site: str, plan: Plan) -> SiteSlots:
        ranks, scales = [0] * self.slots, [0.0] * self.slots
        for slot, _, _ in plan.segments:
            part = self._parts[slot].get(site)
            if part is not None:
                ranks[slot], scales[slot] = part.rank, part.scale
        return SiteSlots(self._a[site], self._b[site], ranks, scales)


def _tensor(matrix: Matrix) -> Tensor:
    return tensor_from_buffer(matrix.dtype, matrix.rows, matrix.columns, matrix.row_stride, matrix.data)


def _tensor_or_none(matrix: Matrix | None) -> Tensor | None:
    return None if matrix is None else _tensor(matrix)


def _holds(slot_rows: Tensor, values: Tensor | None) -> bool:
    """Whether the first rows are `values`, cast, and the others zero, all bit for bit."""
    wanted = torch.zeros_like(slot_rows)
    if values is not None:
        wanted[: len(values)].copy_(values)
    bits = _BITS[slot_rows.element_size()]
    return torch.equal(slot_rows.view(bits), wanted.view(bits))
