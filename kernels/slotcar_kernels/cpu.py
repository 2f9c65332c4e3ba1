"""The segmented LoRA kernel for the CPU: checks the arguments, then runs the compiled kernel, or torch without it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slotcar_kernels import eager, native
from slotcar_kernels.plan import Plan
from slotcar_kernels.sites import SiteSlots

__all__ = ["BEST", "Kernel", "captured", "check_matrix", "check_sites", "isa_for", "lora_forward", "prepare"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What computes: one of `native.ISAS`, "torch", or None for the best that this machine and the slots allow.

    `threads` is for the compiled kernel, the caller's thread included; torch has a setting of its own.
    """

    name: str | None = None
    threads: int = 1


BEST = Kernel()


def lora_forward(
    plan: Plan,
    x: Tensor,
    sites: Sequence[SiteSlots],
    outs: Sequence[Tensor],
    bases: Sequence[Tensor | None] | None = None,
    kernel: Kernel = BEST,
) -> None:
    """out = base + scales[s] · (x a[s]ᵀ) b[s] for the rows of slot s at each site; out = base for BASE rows.

    Without a base (DELTA) it counts as zero, with one (ADD) rows without a delta get its bits. Sums are in float32 and
    rounded once, to x's dtype. The same batch gives the same bits, wherever the tensors lie; from the compiled kernel a
    row gets the same bits in every batch, and on any number of threads.

    plan: of the batch's rows.
    x: [rows, in], float32, float16 or bfloat16, last dimension contiguous; read once for all `sites`. For embeddings
        int64 [rows], ids of tokens, each of which must be below the site's number of tokens.
    sites: the slots of each site that has x as its input.
    outs: per site [rows, out] in x's dtype, of embeddings in any one of them, last dimension contiguous, no row over
        another; written whole.
    bases: per site None or [rows, out] in the dtype of outs, last dimension contiguous; it may be `out` itself.

    Raises ValueError when shapes, dtypes, a rank or the plan do not fit each other, or the kernel that is asked for is
    not there; then nothing was written.
    """
    prepare(plan, x, sites, outs, bases, kernel)()


def prepare(
    plan: Plan,
    x: Tensor,
    sites: Sequence[SiteSlots],
    outs: Sequence[Tensor],
    bases: Sequence[Tensor | None] | None = None,
    kernel: Kernel = BEST,
) -> Callable[[], None]:
    """`lora_forward` without the computation: each call of the result computes from what x, slots and bases have then.

    The ranks and scales are those of now. Raises ValueError as `lora_forward` does.
    """
    bases = [None] * len(sites) if bases is None else bases
    _check(plan, x, sites, outs, bases)
    isa = isa_for(kernel, sites)
    if isa is None:
        return partial(eager.lora_forward, plan, x, captured(sites), outs, bases)
    native_plan = native.NativePlan(plan)
    call = native.PreparedCall(_dtype(x, sites, outs), sites, (isa, kernel.threads))
    slots = [segment[0] for segment in plan.segments]
    ranks = [array("q", [site.ranks[slot] for slot in slots]) for site in sites]
    scales = [array("f", [site.scales[slot] for slot in slots]) for site in sites]
    call.use(native_plan, map(native.address, ranks), map(native.address, scales))
    call.point(x, outs, bases)
    return partial(_run, call, (native_plan, ranks, scales, x, outs, bases))


def _run(call: native.PreparedCall, _kept_alive: object) -> None:
    status = call.run()
    if status:
        raise call.refusal(status)


def captured(sites: Sequence[SiteSlots]) -> list[SiteSlots]:
    """The same slots, with the ranks and scales of now."""
    return [replace(site, ranks=tuple(site.ranks), scales=tuple(site.scales)) for site in sites]


def isa_for(kernel: Kernel, sites: Sequence[SiteSlots]) -> str | None:
    """The instruction set for the compiled kernel, or None for torch: the one place that decides.

    Raises ValueError when the kernel that is asked for is not there.
    """
    if kernel.name == "torch":
        return None
    best = native.best_isa()
    if best is not None and all(map(native.takes, sites)):
        if kernel.name is None:
            return best
        if kernel.name in native.ISAS[: native.ISAS.index(best) + 1]:
            return kernel.name
    if kernel.name is None:
        return None
    raise ValueError(f"no kernel {kernel.name!r} for these slots here; there is {native.backend()}")


def check_sites(dtype: torch.dtype, sites: Sequence[SiteSlots]) -> None:
    """Raises ValueError unless A and B of the sites are alike, and one x of this dtype can be their input."""
    if dtype not in _DTYPES:
        raise ValueError(f"x is {dtype}, wanted one of {_DTYPES}")
    for site in sites:
        if (site.in_features, site.embedding) != (sites[0].in_features, sites[0].embedding):
            raise ValueError(f"sites of {sites[0].in_features} and {site.in_features} features, wanted one input")
        _check_slots(site)


def _check(
    plan: Plan, x: Tensor, sites: Sequence[SiteSlots], outs: Sequence[Tensor], bases: Sequence[Tensor | None]
) -> None:
    if not len(sites) == len(outs) == len(bases):
        raise ValueError(f"{len(sites)} sites, {len(outs)} outs and {len(bases)} bases")
    dtype = _dtype(x, sites, outs)
    check_sites(dtype, sites)
    for site, out, base in zip(sites, outs, bases, strict=True):
        _check_input(x, plan.rows, site)
        check_matrix("out", out, plan.rows, site.out_features, dtype)
        if not out.is_contiguous() and plan.rows > 1 and out.stride(0) < site.out_features:
            raise ValueError(f"rows of out lie over each other, wanted a row stride of at least {site.out_features}")
        if base is not None:
            check_matrix("base", base, plan.rows, site.out_features, dtype)
        _check_plan(plan, site)


def check_matrix(name: str, tensor: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Raises ValueError unless the tensor is [rows, columns] of the dtype on the CPU, each row without gaps."""
    if tensor.shape != (rows, columns) or tensor.dtype != dtype or not tensor.is_cpu:
        found, wanted = (tuple(tensor.shape), tensor.dtype), ((rows, columns), dtype)
        raise ValueError(f"{name} is {found} on {tensor.device}, wanted {wanted} on the CPU")
    if not tensor.is_contiguous() and columns > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, wanted its last dimension contiguous")


def _dtype(x: Tensor, sites: Sequence[SiteSlots], outs: Sequence[Tensor]) -> torch.dtype:
    """In which outs and bases are: x's, or for embeddings, where x has ids, that of the first."""
    return outs[0].dtype if sites and sites[0].embedding else x.dtype


def _check_input(x: Tensor, rows: int, site: SiteSlots) -> None:
    if not site.embedding:
        check_matrix("x", x, rows, site.in_features, x.dtype)
    elif x.shape != (rows,) or x.dtype != torch.int64 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"ids are {tuple(x.shape)} {x.dtype}, wanted {rows} int64 on the CPU")


def _check_slots(site: SiteSlots) -> None:
    a, b = site.a, site.b
    if a.dtype != b.dtype or a.dtype not in _DTYPES or not (a.is_cpu and b.is_cpu):
        raise ValueError(f"a is {a.dtype} and b {b.dtype}, wanted one of {_DTYPES} on the CPU")
    rank_at = -1 if site.embedding else -2
    alike = (
        a.dim() == b.dim() and a.dim() in (3, 4) and a.shape[rank_at] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]
    )
    if not alike or (site.embedding and a.dim() != 3):
        raise ValueError(f"a is {tuple(a.shape)} and b {tuple(b.shape)}, wanted [S, R, in] and [S, R, out]")


def _check_plan(plan: Plan, site: SiteSlots) -> None:
    slots, max_rank = min(site.count, len(site.ranks), len(site.scales)), site.max_rank
    for slot, _, _ in plan.segments:
        if not 0 <= slot < slots or not 0 <= site.ranks[slot] <= max_rank:
            raise ValueError(f"no slot {slot} with a rank up to {max_rank}")
