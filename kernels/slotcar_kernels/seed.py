"""What the LoRA of slots with vectors is added to: the base's output, scaled and moved for each of their rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from slotcar_kernels import native
from slotcar_kernels.cpu import BEST, Kernel, check_matrix
from slotcar_kernels.plan import Plan

__all__ = ["BIAS", "GAIN", "prepare", "uses_vectors"]

GAIN, BIAS = 1, 2  # bits of a slot's flags: the vectors that it has


def uses_vectors(plan: Plan, flags: Sequence[int]) -> bool:
    """Whether a row of the plan is of a slot with vectors: plain LoRA needs no seed."""
    return any(flags[segment.slot] for segment in plan.segments)


def prepare(
    plan: Plan,
    vectors: tuple[Tensor, Sequence[int]],
    out: Tensor,
    base: Tensor | None,
    y: Tensor | None,
    kernel: Kernel = BEST,
) -> Callable[[], None]:
    """seed = base + (gain[s] ⊙ y + bias[s]) for the rows of slot s, and seed = base for others; each call writes it.

    A vector that the flags of a slot do not name counts as zero and is not read, and so does a base that is not given;
    rows without a vector get the base's bits. Each element is computed by itself, in float32, and rounded once.

    plan: of the batch's rows.
    vectors: [S, 2, out] float32, gain and bias of each slot, last dimension contiguous; and S flags.
    out: [rows, out], float32, float16 or bfloat16, last dimension contiguous; written whole.
    base: [rows, out] in out's dtype, or None; it may be `out` itself.
    y: [rows, out] in out's dtype, the base model's output; it may be `base`. None: no slot of the plan has a gain.

    Raises ValueError when something does not fit; then nothing was written.
    """
    values, flags = vectors
    used = [int(flags[segment.slot]) for segment in plan.segments]
    check_matrix("out", out, plan.rows, values.shape[2], out.dtype)
    for name, tensor in (("base", base), ("y", y)):
        if tensor is not None:
            check_matrix(name, tensor, plan.rows, values.shape[2], out.dtype)
    if values.dtype != torch.float32 or values.dim() != 3 or values.shape[1] != 2 or values.stride(2) != 1:
        raise ValueError(f"vectors are {tuple(values.shape)} {values.dtype}, wanted [S, 2, out] of float32")
    if any(not 0 <= segment.slot < len(values) for segment in plan.segments):
        raise ValueError(f"the plan has slots out of range, wanted them below {len(values)}")
    if y is None and any(flag & GAIN for flag in used):
        raise ValueError("a slot has a gain, and y is not given")
    isa = native.best_isa() if kernel.name is None else kernel.name
    if isa is None or isa == "torch":
        return partial(_seed_with_torch, plan, (values, used), out, base, y)
    native_seed = native.PreparedSeed(native.NativePlan(plan), array("q", used), (values, out, base, y))
    return partial(native_seed.run, isa)


@torch.inference_mode()
def _seed_with_torch(
    plan: Plan, vectors: tuple[Tensor, Sequence[int]], out: Tensor, base: Tensor | None, y: Tensor | None
) -> None:
    values, used = vectors
    y_before = None if y is None else y.to(torch.float32, copy=True)  # out may be y
    if base is None:
        out.zero_()
    elif base.data_ptr() != out.data_ptr():
        out.copy_(base)
    for (slot, start, stop), flags in zip(plan.segments, used, strict=True):
        if not flags:
            continue
        rows = torch.arange(start, stop) if plan.order is None else plan.order[start:stop]
        moved = torch.zeros(len(rows), out.shape[1])
        if flags & BIAS:
            moved += values[slot, 1]
        if flags & GAIN and y_before is not None:
            moved += values[slot, 0] * y_before[rows]
        out[rows] = (moved if base is None else out[rows].float() + moved).to(out.dtype)
