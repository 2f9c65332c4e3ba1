"""Slots in the memory of the CPU, filled from host weights and computed with by slotcar's kernel.

Invariant: after a fill the slot has its adapter's bytes, cast to the slot dtype, and zeros from each rank up to
the padded rank; a prepared batch keeps the ranks and scales that it was prepared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from slotcar.shm.slots import EPOCH_BYTES, SlotsGeometry
from slotcar_kernels import native
from slotcar_kernels.buffers import DTYPE_NAMES, DTYPES, tensor_from_buffer
from slotcar_kernels.cpu import prepare
from slotcar_kernels.fill import SlotArray, fill_slot
from slotcar_kernels.native import backend as kernel_backend
from slotcar_kernels.plan import Plan, plan_rows
from slotcar_kernels.sites import SiteSlots
from torch import Tensor

from slotcar_sidecar.core.adapter import SiteLora
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.ports import Batch, HostAdapter
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.device.slots_file import SlotsFile
from slotcar_sidecar.device.weights import check_range, host_tensors, padded_rank

__all__ = ["CpuBatch", "CpuDevice", "kernel_backend"]

_BITS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True, slots=True, eq=False)
class CpuBatch:
    """A prepared Forward: each execution reads the bytes of its items, and the slots, as they are then.

    `calls` has one call of the kernel for each input; `outputs` one matrix per item, which an execution writes.
    """

    plan: Plan
    calls: tuple[Callable[[], None], ...]
    outputs: tuple[Matrix, ...]


class CpuDevice:
    """S slots; each has, per site, A [max_rank, in] and Bᵀ [max_rank, out] of `slot_dtype`, in the epoch's slots file.

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
        # What fits, as long as it is there: a look at all values takes as long as a fill.
        self._checked: WeakValueDictionary[int, HostAdapter] = WeakValueDictionary()
        self._a: dict[str, Tensor] = {}
        self._b: dict[str, Tensor] = {}
        # Per slot, by site; a fill replaces its slot's mapping, and only fills of different slots run at one time.
        self._parts: list[Mapping[str, SiteLora]] = [{} for _ in range(slots)]

    def shape(self, model: ModelSpec) -> None:
        """Makes the slots for `model`; without poison, memory is touched only when a slot is filled."""
        assert self._model is None, "a device is shaped once"
        features = [(site.in_features, site.out_features) for site in model.sites]
        geometry = SlotsGeometry(self.slots, self.max_rank, self.slot_dtype, features)
        file = SlotsFile(geometry, self._epoch)
        weights = torch.frombuffer(file.memory, dtype=self._dtype, offset=geometry.weights_offset)
        if self._poison:
            weights.fill_(math.nan)
        for index, site in enumerate(model.sites):
            self._a[site.name] = self._slots_at(weights, geometry, geometry.a_offsets[index], site.in_features)
            self._b[site.name] = self._slots_at(weights, geometry, geometry.b_offsets[index], site.out_features)
        self._file, self._model = file, model

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

    def check(self, weights: HostAdapter) -> None:
        """Raises AdapterInvalid unless the adapter fits the model, and its values fit the slot dtype."""
        assert self._model is not None, "a device is shaped before it is filled"
        if self._checked.get(id(weights)) is weights:
            return
        weights.adapter.check_fits(self._model, self.max_rank)
        check_range(host_tensors(weights), self.slot_dtype)
        self._checked[id(weights)] = weights

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
        assert self._file is not None
        self._parts[slot] = {}
        self._file.use_huge_pages(slot)
        self._file.write_parts(
            slot, [(parts[site].rank, parts[site].scale) if site in parts else (0, 0.0) for site in self._a]
        )
        values = (host.a, {site: b.t() for site, b in host.b.items()})
        fill_slot(
            [
                SlotArray(slots[site][slot, :padded], tensors.get(site))
                for slots, tensors in zip((self._a, self._b), values, strict=True)
                for site in slots
            ]
        )
        if self._poison:
            for slots in (*self._a.values(), *self._b.values()):
                slots[slot, padded:].fill_(math.nan)
        self._parts[slot] = parts

    def prepare(self, entries: Sequence[tuple[SlotId | None, int]], items: Sequence[ForwardItem]) -> CpuBatch:
        """Groups the rows by slot and the items by their x, and captures ranks and scales as they are now."""
        plan = plan_rows(entries)
        outs = [self._out(item, plan.rows) for item in items]
        by_input: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            by_input.setdefault(id(item.x), []).append(index)
        calls = [
            prepare(
                plan,
                _tensor(items[indices[0]].x),
                [self._site_slots(items[index].site, plan) for index in indices],
                [outs[index] for index in indices],
                [_tensor_or_none(items[index].base) for index in indices],
            )
            for indices in by_input.values()
        ]
        outputs = [item.out or _matrix(out) for item, out in zip(items, outs, strict=True)]
        return CpuBatch(plan, tuple(calls), tuple(outputs))

    def execute(self, batch: Batch) -> tuple[Matrix, ...]:
        """Computes one [rows, out_features] matrix per item, in the dtype of its x: base + delta, or the delta."""
        assert isinstance(batch, CpuBatch)
        for call in batch.calls:
            call()
        return batch.outputs

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

    def _slots_at(self, weights: Tensor, geometry: SlotsGeometry, offset: int, features: int) -> Tensor:
        """[S, R, features] of one site: the same place in each slot."""
        size = self._dtype.itemsize
        shape = (self.slots, self.max_rank, features)
        return weights.as_strided(shape, (geometry.slot_bytes // size, features, 1), offset // size)

    def _out(self, item: ForwardItem, rows: int) -> Tensor:
        """Where the item's result goes: where it says, or memory of its own."""
        if item.out is not None:
            return _tensor(item.out)
        return torch.empty(rows, self._b[item.site].shape[2], dtype=DTYPES[item.x.dtype])

    def _site_slots(self, site: str, plan: Plan) -> SiteSlots:
        ranks, scales = [0] * self.slots, [0.0] * self.slots
        for slot, _, _ in plan.segments:
            part = self._parts[slot].get(site)
            if part is not None:
                ranks[slot], scales[slot] = part.rank, part.scale
        return SiteSlots(self._a[site], self._b[site], ranks, scales)


def _tensor(matrix: Matrix) -> Tensor:
    return tensor_from_buffer(matrix.dtype, matrix.rows, matrix.columns, matrix.row_stride, matrix.data)


def _matrix(tensor: Tensor) -> Matrix:
    """The tensor's own memory, as a matrix."""
    rows, columns = tensor.shape
    return Matrix(DTYPE_NAMES[tensor.dtype], rows, columns, columns, tensor.view(torch.uint8).flatten().numpy().data)


def _tensor_or_none(matrix: Matrix | None) -> Tensor | None:
    return None if matrix is None else _tensor(matrix)


def _holds(slot_rows: Tensor, values: Tensor | None) -> bool:
    """Whether the first rows are `values`, cast, and the others zero, all bit for bit."""
    wanted = torch.zeros_like(slot_rows)
    if values is not None:
        wanted[: len(values)].copy_(values)
    bits = _BITS[slot_rows.element_size()]
    return torch.equal(slot_rows.view(bits), wanted.view(bits))
