"""What a call must be for the kernels to be launched: everything that the host can see is checked here, before.

A kernel that reads out of bounds ends the process, or reads another adapter's weights; so nothing is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slotcar_kernels.triton.plan import BatchPlan
from slotcar_kernels.triton.slices import SlicePart
from slotcar_kernels.triton.tiles import MAX_RANK

__all__ = ["ADDRESS_BYTES", "check_matrix", "check_parts", "check_ranks", "check_separate"]

ADDRESS_BYTES = 16
"""What addresses of matrices of rows are multiples of, so that a load takes 16 bytes."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_ranks(ranks: Sequence[int], max_rank: int) -> None:
    """Raises ValueError unless ranks that are on the host, to be copied into a SlicePart's, are 0 to max_rank."""
    for slot, rank in enumerate(ranks):
        if not 0 <= rank <= max_rank:
            raise ValueError(f"rank {rank} in slot {slot}, wanted 0 to {max_rank}")


def check_matrix(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError unless the tensor is of this shape, dtype and device, aligned, each row without gaps."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        found = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{name} is {found}, wanted {shape} {dtype} on {device}")
    if dtype not in _DTYPES:
        raise ValueError(f"{name} is {dtype}, wanted one of {_DTYPES}")
    if shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}, wanted its last dimension contiguous")
    if tensor.data_ptr() % ADDRESS_BYTES:
        raise ValueError(f"{name} is at {tensor.data_ptr():#x}, wanted a multiple of {ADDRESS_BYTES} bytes")


def check_separate(out: Tensor, base: Tensor | None) -> None:
    """Raises ValueError if rows of out lie over each other, or over the base's, which may only be out itself."""
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"rows of out lie over each other, wanted a row stride of at least {out.shape[1]}")
    if base is None or (base.data_ptr() == out.data_ptr() and base.stride(0) == out.stride(0)):
        return
    first, last = max(_extent(out)[0], _extent(base)[0]), min(_extent(out)[1], _extent(base)[1])
    if first < last:
        raise ValueError(f"base lies over {last - first} bytes of out, wanted it apart, or out itself")


def check_parts(plan: BatchPlan, parts: Sequence[SlicePart], embedding: bool) -> None:
    """Raises ValueError unless A, B, ranks and scales of all parts fit each other and the plan's slots."""
    if not parts:
        raise ValueError("a site without parts, wanted at least one")
    for part in parts:
        _check_matrices(part, parts[0], embedding)
        if 0 in (*part.a.shape, *part.b.shape):
            raise ValueError(f"a is {tuple(part.a.shape)} and b {tuple(part.b.shape)}, wanted no dimension of 0")
        if part.b.shape[0] < plan.slot_count or part.experts != plan.experts:
            found = f"{part.b.shape[0]} slots of {part.experts} experts"
            raise ValueError(f"{found}, wanted the plan's {plan.slot_count} of {plan.experts}")
        if {part.a.device, part.b.device} != {plan.rows.device}:
            raise ValueError(f"a is on {part.a.device} and b on {part.b.device}, wanted the plan's {plan.rows.device}")
        _check_table("ranks", part.ranks, torch.int32, part)
        _check_table("scales", part.scales, torch.float32, part)


def _check_matrices(part: SlicePart, first: SlicePart, embedding: bool) -> None:
    """Raises ValueError unless A and B fit each other, and the site's first part."""
    a, b = part.a, part.b
    if a.dtype != b.dtype or a.dtype not in _DTYPES or a.dtype != first.a.dtype:
        raise ValueError(f"a is {a.dtype} and b {b.dtype}, wanted one dtype of {_DTYPES} in all parts")
    features_at, rank_at = (-2, -1) if embedding else (-1, -2)
    if a.dim() != b.dim() or a.dim() not in (3, 4) or (embedding and a.dim() != 3):
        raise ValueError(f"a is {tuple(a.shape)} and b {tuple(b.shape)}, wanted [S, R, in] and [S, R, out]")
    if a.shape[rank_at] != part.max_rank or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"a is {tuple(a.shape)} and b {tuple(b.shape)}, wanted the same slots and ranks")
    if (a.shape[features_at], part.max_rank) != (first.a.shape[features_at], first.max_rank):
        raise ValueError(f"a is {tuple(a.shape)}, wanted the input and ranks of {tuple(first.a.shape)}")
    if not 1 <= part.max_rank <= MAX_RANK:
        raise ValueError(f"slots of rank {part.max_rank}, wanted 1 to {MAX_RANK}")
    if a.stride(-1) != 1 or b.stride(-1) != 1:
        raise ValueError(f"a has strides {a.stride()} and b {b.stride()}, wanted the last dimension contiguous")


def _check_table(name: str, table: Tensor, dtype: torch.dtype, part: SlicePart) -> None:
    count = part.b.shape[0] * part.experts
    if table.shape != (count,) or table.dtype != dtype or table.device != part.b.device or not table.is_contiguous():
        found = f"{tuple(table.shape)} {table.dtype} on {table.device}"
        raise ValueError(f"{name} are {found}, wanted {(count,)} {dtype} on {part.b.device}")
    if table.is_cpu and name == "ranks":
        check_ranks(table.tolist(), part.max_rank)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first address, and the one behind the last."""
    first, (rows, columns) = tensor.data_ptr(), tensor.shape
    return first, first + ((rows - 1) * tensor.stride(0) + columns) * tensor.itemsize
