"""Slots of this process alone, laid out as the sidecar's are: what in-process peers compute with."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping, Sequence

import torch
from slotcar.shm.mapping import map_file, use_huge_pages
from slotcar.shm.slots import LeafShape, SlotsGeometry
from slotcar_kernels.buffers import DTYPE_NAMES
from slotcar_kernels.sites import SiteSlots

from tests.bench.stage import ALPHA, Site

__all__ = ["KINDS", "PrivateSlots"]

KINDS = ("anonymous", "shared")


class PrivateSlots:
    """`sites` has the slots of each site by its name; adapter number n of `fill` is in slot n."""

    def __init__(self, sites: Sequence[Site], slots: int, rank: int, dtype: torch.dtype, kind: str) -> None:
        """kind: "anonymous" memory, or "shared" pages that nobody else has; with huge pages where there are some."""
        ordered = sorted(sites)  # as a ModelSpec has them
        geometry = SlotsGeometry(slots, rank, DTYPE_NAMES[dtype], [LeafShape(*site[1:]) for site in ordered])
        weights = torch.frombuffer(_memory(geometry.total_bytes, kind), dtype=dtype, offset=geometry.weights_offset)
        stride = geometry.slot_bytes // dtype.itemsize

        def at(offset: int, features: int) -> torch.Tensor:
            return weights.as_strided((slots, rank, features), (stride, features, 1), offset // dtype.itemsize)

        scales, ranks = [ALPHA / rank] * slots, [rank] * slots
        places = zip(ordered, geometry.a_offsets, geometry.b_offsets, strict=True)
        self.sites = {
            site.name: SiteSlots(at(a, site.in_features), at(b, site.out_features), ranks, scales)
            for site, a, b in places
        }

    def fill(self, slot: int, weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Writes an adapter of the slots' rank: per site A [rank, in] and B [out, rank]."""
        for name, (a, b) in weights.items():
            self.sites[name].a[slot].copy_(a)
            self.sites[name].b[slot].copy_(b.t())


def _memory(size: int, kind: str) -> memoryview:
    """With huge pages, where the system has some."""
    if kind == "anonymous":
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(pages)
    descriptor = os.memfd_create("bench-slots", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    memory = map_file(descriptor, size, writable=True)
    os.close(descriptor)
    use_huge_pages(memory, 0, size)
    return memory
