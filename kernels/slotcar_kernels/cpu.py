"""The segmented LoRA kernel for the CPU, in torch operations.

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

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT_BYTES = 64
_BLOCK_ROWS = 64  # bounds scratch to what the L2 cache holds


@torch.inference_mode()
def lora_forward(
    plan: Plan,
    x: Tensor,
    sites: Sequence[SiteSlots],
    outs: Sequence[Tensor],
    bases: Sequence[Tensor | None] | None = None,
) -> None:
    """out = base + scales[s] · (x a[s]ᵀ) b[s] for the rows of slot s at each site; out = base for BASE rows.

    Without a base (DELTA) it counts as zero, with one (ADD) rows without a delta get its bits. Sums are in float32 and
    rounded once, to x's dtype. The same values give the same bits, wherever the tensors lie.

    plan: of the batch's rows.
    x: [rows, in], float32, float16 or bfloat16, last dimension contiguous; read once for all `sites`.
    sites: the slots of each site that has x as its input.
    outs: per site [rows, out] in x's dtype, last dimension contiguous; written whole.
    bases: per site None or [rows, out] in x's dtype; it may be `out` itself.

    Raises ValueError when shapes, dtypes or a rank do not fit each other; then nothing was written.
    """
    bases = [None] * len(sites) if bases is None else bases
    _check(plan, x, sites, outs, bases)
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
        a_transposed, b = site.a[slot, :rank].float().t(), site.b[slot, :rank].float()
        for first in range(start, stop, _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, stop)
            delta = out[first:last] if scratch is None else scratch[: last - first]
            torch.addmm(delta, torch.mm(x[first:last], a_transposed), b, beta=0, alpha=scale, out=delta)
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


def _check(
    plan: Plan, x: Tensor, sites: Sequence[SiteSlots], outs: Sequence[Tensor], bases: Sequence[Tensor | None]
) -> None:
    if x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype}, wanted one of {_DTYPES}")
    if not len(sites) == len(outs) == len(bases):
        raise ValueError(f"{len(sites)} sites, {len(outs)} outs and {len(bases)} bases")
    for site, out, base in zip(sites, outs, bases, strict=True):
        _check_matrix("x", x, plan.rows, site.in_features, x.dtype)
        _check_matrix("out", out, plan.rows, site.out_features, x.dtype)
        if base is not None:
            _check_matrix("base", base, plan.rows, site.out_features, x.dtype)
        for slot, _, _ in plan.segments:
            if slot >= len(site.ranks) or not 0 <= site.ranks[slot] <= site.a.shape[1]:
                raise ValueError(f"no slot {slot} with a rank up to {site.a.shape[1]}")


def _check_matrix(name: str, tensor: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
    if tensor.shape != (rows, columns) or tensor.dtype != dtype:
        found, wanted = (tuple(tensor.shape), tensor.dtype), ((rows, columns), dtype)
        raise ValueError(f"{name} is {found}, wanted {wanted}")
