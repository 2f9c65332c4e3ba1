"""Batches for the interpreted kernels, with NaN and impossible numbers wherever a kernel must not read.

Slots are poisoned as `tests.kernels.cases` says; rows behind the live ones, scratch and index buffers are garbage, and
`out` is NaN where nothing may be written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from slotcar_kernels.reference import lora_rows
from slotcar_kernels.sites import SiteSlots
from slotcar_kernels.triton import BatchPlan, Prepared, SiteCall, SlicePart, planes_elements, prepare

from tests.kernels.cases import Entries, Padded, padded
from tests.tolerances import assert_close, assert_same_bits

CPU = torch.device("cpu")
GARBAGE = 2**31 - 7
ALIGNED_GAP, ODD_GAP, OFFSET = 8, 5, 16  # in elements


def slots_by_row(entries: Entries) -> list[int]:
    return [-1 if slot is None else slot for slot, count in entries for _ in range(count)]


def on_device(site: SiteSlots) -> SlicePart:
    ranks, scales = torch.tensor(site.ranks, dtype=torch.int32), torch.tensor(site.scales, dtype=torch.float32)
    return SlicePart(site.a, site.b, ranks, scales)


def plan_of(bucket: int, site: SiteSlots) -> BatchPlan:
    """A plan whose index buffers are garbage."""
    plan = BatchPlan.of_bucket(bucket, site.b.shape[0], CPU)
    for buffer in (plan.keys, plan.order, plan.segments, plan.tiles, plan.counts, plan.faults):
        buffer.fill_(GARBAGE)
    return plan


def load(plan: BatchPlan, slots: Sequence[int]) -> None:
    """The batch's slots in the plan, and garbage behind them."""
    plan.write(slots)
    plan.slots[len(slots) :] = GARBAGE


@dataclass
class Batch:
    """Inputs of a site for the rows of a bucket; the rows behind `rows` are NaN."""

    entries: Entries
    sites: Sequence[SiteSlots]
    dtype: torch.dtype
    mode: str = "delta"
    bucket: int = 64
    gap: int = ALIGNED_GAP
    seed: int = 0

    def __post_init__(self) -> None:
        self.slots = slots_by_row(self.entries)
        self.rows = len(self.slots)
        self.widths = [site.out_features for site in self.sites]
        first = self.sites[0]
        self.x = self._matrix(self._random(self.rows, 1 if first.embedding else first.in_features))
        self.base = self._matrix(self._random(self.rows, sum(self.widths), 1))
        nothing = torch.full((self.bucket, sum(self.widths)), math.nan, dtype=self.dtype)
        self.out = padded(nothing, gap=self.gap, offset=OFFSET)
        if self.mode == "in place":
            self.out.view.copy_(self.base.view)
        self.aux: torch.Tensor | None = None

    def call(self) -> SiteCall:
        base = {"delta": None, "add": self.base.view, "in place": self.out.view}[self.mode]
        x = None if self.sites[0].embedding else self.x.view
        return SiteCall([on_device(site) for site in self.sites], self.out.view, x, base, self.aux)

    def prepare(self) -> tuple[BatchPlan, Prepared]:
        """The plan and the site's launches, over scratch that is NaN."""
        plan, call = plan_of(self.bucket, self.sites[0]), self.call()
        return plan, prepare(plan, call, torch.full((max(planes_elements(plan, call), 1),), math.nan))

    def run(self) -> torch.Tensor:
        """The live rows of `out`, after a check that nothing else was written."""
        plan, site = self.prepare()
        load(plan, self.slots)
        plan.execute()
        site.execute()
        assert not plan.faults.any()
        return self.live_out()

    def live_out(self) -> torch.Tensor:
        self.out.assert_rest_untouched()
        assert self.out.view[self.rows :].isnan().all(), "written behind the live rows"
        return self.out.view[: self.rows]

    def truth(self) -> torch.Tensor:
        """float64 [rows, columns of all slices]."""
        start, found = 0, []
        x = self.x.view[: self.rows] if self.aux is None else self.aux[: self.rows, 0].long()
        for site, width in zip(self.sites, self.widths, strict=True):
            base = None if self.mode == "delta" else self.base.view[: self.rows, start : start + width]
            found.append(lora_rows(self.entries, x, site, base))
            start += width
        return torch.cat(found, 1)

    def check(self) -> None:
        """The result is the truth within its dtype's tolerance, and rows of BASE have the exact bits (I9)."""
        found = self.run()
        assert_close(found, self.truth())
        of_base = torch.tensor([slot < 0 for slot in self.slots], dtype=torch.bool)
        wanted = torch.zeros_like(found) if self.mode == "delta" else self.base.view[: self.rows]
        assert_same_bits(found[of_base], wanted[of_base])

    def _random(self, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 7 * seed + rows)
        return torch.randn(rows, columns, generator=generator).to(self.dtype)

    def _matrix(self, live: torch.Tensor) -> Padded:
        whole = torch.full((self.bucket, live.shape[1]), math.nan, dtype=self.dtype)
        whole[: len(live)] = live
        return padded(whole, gap=self.gap, offset=OFFSET)
