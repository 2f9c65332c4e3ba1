"""Graphs over fixed addresses: one for the index work of a token bucket, and one for each kind of site in it.

Sites whose parts have the same shapes are of one kind: a graph reads where its parts lie in a table, and the table of
the site that is next is copied there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from slotcar_kernels.triton import BatchPlan, SiteCall, SlicePart, prepare
from slotcar_kernels.triton.slices import slice_table
from torch import Tensor

from slotcar_sidecar.device.cuda.machine import Machine, Stream

__all__ = ["BucketPlan", "Kind", "SiteLaunch"]


@dataclass(frozen=True, slots=True)
class Kind:
    """All that a graph knows of its sites; `shapes` has shape, strides and alignment of each part's A and B."""

    bucket: int
    dtype: torch.dtype
    adds: bool
    is_embedding: bool
    shapes: tuple[tuple[object, ...], ...]

    @classmethod
    def of(cls, bucket: int, dtype: torch.dtype, adds: bool, is_embedding: bool, parts: Sequence[SlicePart]) -> Kind:
        shapes = tuple(
            (tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % 16)
            for part in parts
            for tensor in (part.a, part.b)
        )
        return cls(bucket, dtype, adds, is_embedding, shapes)


class BucketPlan:
    """The index work of a token bucket."""

    def __init__(self, bucket: int, slot_count: int, machine: Machine, stream: Stream) -> None:
        self.plan = BatchPlan.of_bucket(bucket, slot_count, machine.device)
        self._staging = machine.pinned((bucket + 1,), torch.int32)
        self._run = stream.capture(self.plan.execute)

    def execute(self, slots: Sequence[int]) -> None:
        """Enqueues it for rows of these slots; the rows before must be done with."""
        self.plan.write(slots, self._staging)
        self._run()


class SiteLaunch:
    """A kind's launches, and the memory of the rows that they compute: x, out and aux, on the device and pinned."""

    def __init__(
        self, kind: Kind, plan: BatchPlan, parts: Sequence[SlicePart], machine: Machine, stream: Stream
    ) -> None:
        self._machine = machine
        first, width = parts[0], sum(part.out_features for part in parts)
        by_aux = kind.is_embedding or first.b.dim() == 4
        self.x = None if kind.is_embedding else self._both(kind.bucket, first.a.shape[-1], kind.dtype)
        self.out = self._both(kind.bucket, width, kind.dtype)
        self.aux = self._both(kind.bucket, 1, torch.int32) if by_aux else None
        call = SiteCall(
            parts,
            self.out.on_device,
            None if self.x is None else self.x.on_device,
            self.out.on_device if kind.adds else None,
            None if self.aux is None else self.aux.on_device,
        )
        self._prepared = prepare(plan, call)
        self._tables: dict[tuple[str, int], Tensor] = {}
        self._run: Callable[[], None] = stream.capture(self._prepared.execute)

    def execute(self, site: tuple[str, int], parts: Sequence[SlicePart]) -> None:
        """Enqueues the kernels for a site of the kind and a rank, named so."""
        table = self._tables.get(site)
        if table is None:
            table, _ = slice_table(parts, self._prepared.tiles.expand.width)
            self._tables[site] = table
        self._prepared.table.copy_(table)
        self._run()

    def _both(self, rows: int, columns: int, dtype: torch.dtype) -> Rows:
        on_device = torch.zeros(rows, columns, dtype=dtype, device=self._machine.device)
        return Rows(on_device, self._machine.pinned((rows, columns), dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A matrix on the device, and the pinned memory that it is copied from and to."""

    on_device: Tensor
    pinned: Tensor

    def give(self, rows: Tensor) -> None:
        """Enqueues the copy of the first rows to the device."""
        count = len(rows)
        self.pinned[:count].copy_(rows)
        self.on_device[:count].copy_(self.pinned[:count], non_blocking=True)

    def take(self, count: int) -> None:
        """Enqueues the copy of the first rows back."""
        self.pinned[:count].copy_(self.on_device[:count], non_blocking=True)
