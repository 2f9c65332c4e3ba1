"""The segmented LoRA kernel for the CPU in torch operations, for installations without the compiled one.

Follows the SGMV decomposition of Punica (Chen et al., 2023, arXiv:2310.18547): rows grouped by adapter, a shrink to the
rank and an expand from it per group, without padding to a common rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slotcar_kernels.plan import Plan
from slotcar_kernels.sites import SiteSlots

__all__ = ["lora_forward"]

_ALIGNMENT_BYTES = 64
_BLOCK_ROWS = 64  # bounds scratch to what the L2 cache holds


@torch.inference_mode()
def lora_forward(
    plan: Plan, x: Tensor, sites: Sequence[SiteSlots], outs: Sequence[Tensor], bases: Sequence[Tensor | None]
) -> None:
    """As cpu.lora_forward, which has checked the arguments; the same batch gives the same bits wherever it lies."""
    if any(site.embedding and bool(((x < 0) | (x >= site.in_features)).any()) for site in sites):
        raise ValueError("an id is of no token")
    x_grouped = _grouped_input(plan, x)
    for site, out, base in zip(sites, outs, bases, strict=True):
        if plan.order is None or plan.inverse is None:
            _compute(plan, x_grouped, site, out, base)
        else:
            grouped = torch.empty(out.shape, dtype=out.dtype)
            _compute(plan, x_grouped, site, grouped, None if base is None else base.index_select(0, plan.order))
            torch.index_select(grouped, 0, plan.inverse, out=out)


def _grouped_input(plan: Plan, x: Tensor) -> Tensor:
    """x by positions, float32, aligned, so that BLAS sums in the same order at every call; BASE rows may be missing."""
    if not plan.segments:
        return x
    if plan.order is not None:
        x = x.index_select(0, plan.order[: plan.adapter_rows])
    if x.dtype == torch.int64:
        return x
    x = x.to(torch.float32)
    return x if _is_plain(x) else x.clone(memory_format=torch.contiguous_format)


def _compute(plan: Plan, x: Tensor, site: SiteSlots, out: Tensor, base: Tensor | None) -> None:
    """Writes `out` by positions; x and base are by positions too."""
    for start, stop in plan.base_ranges:
        _write_no_delta(out[start:stop], None if base is None else base[start:stop])
    scratch = None
    if base is not None or out.dtype != torch.float32 or not _is_plain(out):
        scratch = torch.empty(min(plan.rows, _BLOCK_ROWS), site.out_features)
    for slot, start, stop in plan.segments:
        rank, scale = site.ranks[slot], site.scales[slot]
        if rank == 0:
            _write_no_delta(out[start:stop], None if base is None else base[start:stop])
            continue
        a, b = site.matrices(slot)
        a, b = a if site.embedding else a.float().t(), b.float()
        for first in range(start, stop, _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, stop)
            delta = out[first:last] if scratch is None else scratch[: last - first]
            inner = a[x[first:last]].float() if site.embedding else torch.mm(x[first:last], a)
            torch.addmm(delta, inner, b, beta=0, alpha=scale, out=delta)
            if base is not None:
                torch.add(delta, base[first:last], out=out[first:last])
            elif scratch is not None:
                out[first:last].copy_(delta)


def _write_no_delta(out: Tensor, base: Tensor | None) -> None:
    if base is None:
        out.zero_()
    else:
        out.copy_(base)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT_BYTES == 0
