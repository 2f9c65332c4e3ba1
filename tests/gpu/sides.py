"""What is timed at one site: slotcar, torch and atomics, adding the same rows' LoRA in place, and nothing at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
from slotcar_kernels.triton import BatchPlan, SiteCall, SlicePart, planes_elements, prepare
from triton import language as tl

from tests.gpu import atomics
from tests.gpu.place import DEVICE
from tests.gpu.report import Case

__all__ = ["FEWEST_BYTES", "Launch", "Site", "Step", "atomics_side", "nothing", "slotcar_side", "torch_side"]

FEWEST_BYTES = 130e6
"""How much the slots of a replay have together: more than the caches of any GPU that this is for."""

FEWEST_SITES = 8
DTYPE = torch.bfloat16
SCALE = 0.5

Launch = Callable[[], None]


@dataclass(frozen=True)
class Site:
    """Slots of one rank, and the rows of a step: a [S, R, in], b [S, R, out], x [rows, in], out [rows, out]."""

    a: torch.Tensor
    b: torch.Tensor
    x: torch.Tensor
    out: torch.Tensor

    def wanted(self, slots: Sequence[int]) -> torch.Tensor:
        """float64 [rows, out]: what a launch makes of `out` as it is now."""
        out = self.out.double()
        for row, slot in enumerate(slots):
            out[row] += SCALE * (self.b[slot].double().t() @ (self.a[slot].double() @ self.x[row].double()))
        return out


@dataclass(frozen=True)
class Step:
    """The rows of a decode step, mixed, and sites enough that no cache has the slots of the one that is next."""

    case: Case
    slots: Sequence[int]
    sites: Sequence[Site]

    @classmethod
    def of(cls, case: Case, fewest_bytes: float | None = None) -> Step:
        generator = torch.Generator().manual_seed(case.tokens + case.rank)
        order = torch.randperm(case.tokens, generator=generator).tolist()
        wanted = FEWEST_BYTES if fewest_bytes is None else fewest_bytes
        count = max(FEWEST_SITES, math.ceil(wanted / case.weight_bytes))
        return cls(case, [row % case.adapters for row in order], [_site(case) for _ in range(count)])


def _site(case: Case) -> Site:
    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)

    return Site(
        random(case.adapters, case.rank, case.hidden, scale=case.hidden**-0.5),
        random(case.adapters, case.rank, case.hidden, scale=case.rank**-0.5),
        random(case.tokens, case.hidden),
        random(case.tokens, case.hidden),
    )


def slotcar_side(step: Step) -> tuple[Launch, list[Launch]]:
    """The index work of the step, and what its sites launch."""
    case = step.case
    plan = BatchPlan.of_bucket(case.tokens, case.adapters, DEVICE)
    plan.write(step.slots)
    ranks = torch.full((case.adapters,), case.rank, dtype=torch.int32, device=DEVICE)
    scales = torch.full((case.adapters,), SCALE, device=DEVICE)
    calls = [SiteCall([SlicePart(site.a, site.b, ranks, scales)], site.out, site.x, site.out) for site in step.sites]
    planes = torch.empty(planes_elements(plan, calls[0]), device=DEVICE)
    return plan.execute, [prepare(plan, call, planes).execute for call in calls]


def torch_side(step: Step) -> list[Launch]:
    """A loop over the adapters of the step."""
    rows: dict[int, list[int]] = {}
    for row, slot in enumerate(step.slots):
        rows.setdefault(slot, []).append(row)
    groups = [(slot, torch.tensor(of_slot, device=DEVICE)) for slot, of_slot in sorted(rows.items())]
    return [partial(_add_with_torch, site, groups) for site in step.sites]


def _add_with_torch(site: Site, groups: Sequence[tuple[int, torch.Tensor]]) -> None:
    for slot, rows in groups:
        inner = site.x.index_select(0, rows) @ site.a[slot].t()
        site.out.index_add_(0, rows, inner @ site.b[slot], alpha=SCALE)


def atomics_side(step: Step, setting: atomics.Setting) -> list[Launch]:
    slots = torch.tensor(step.slots)
    order = torch.argsort(slots, stable=True).int().to(DEVICE)
    starts = torch.zeros(step.case.adapters + 1, dtype=torch.int32)
    starts[1:] = torch.bincount(slots, minlength=step.case.adapters).cumsum(0)
    rows, inner = (order, starts.to(DEVICE)), torch.empty(step.case.tokens, step.case.rank, device=DEVICE)
    return [
        partial(atomics.add, site.x, (site.a, site.b, SCALE), site.out, rows, inner, setting) for site in step.sites
    ]


@triton.jit
def _nothing(where, NEVER: tl.constexpr):
    if NEVER:
        tl.store(where, 0.0)


def nothing(where: torch.Tensor) -> None:
    """A launch that does nothing: what a node of a graph takes by itself."""
    _nothing[(1,)](where, NEVER=False, num_warps=1)
