"""Writes a slot's arrays from an adapter's tensors: by the compiled library, or by torch where it can't."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from slotcar_kernels import native

__all__ = ["SlotArray", "fill_columns", "fill_slot"]


class SlotArray(NamedTuple):
    """One array of a slot, and what it is to hold.

    rows: [padded rank, features], in the slots' dtype, without gaps.
    values: [rank, features] of float32, float16 or bfloat16, finite; any strides, but those of a matrix without gaps or
        of its transpose are the fast ones. None stands for rank 0.
    """

    rows: Tensor
    values: Tensor | None


def fill_slot(arrays: Sequence[SlotArray], kernel: str | None = None) -> None:
    """rows[:rank] = values, rounded to the nearest even as torch does, and rows[rank:] = 0, for each array.

    The compiled library writes without the GIL, and when this ends, whoever sees a later write of this thread sees it
    all. `kernel` is one of `native.ISAS`, "torch", or None for the best. Raises ValueError when rows and values
    do not fit each other, or the kernel that is asked for is not there; then nothing was written.
    """
    for part in arrays:
        _check(part, arrays[0].rows)
    isa = _isa(kernel)
    if isa is None or not all(map(_is_plain, arrays)):
        _fill_with_torch(arrays)
    elif arrays:
        words = array("q", [word for part in arrays for word in _words(part)])
        native.fill(words, len(arrays), arrays[0].rows.dtype, isa)


def fill_columns(columns: Tensor, values: Tensor | None) -> None:
    """columns[:, :rank] = valuesᵀ, rounded as `fill_slot` does, and columns[:, rank:] = 0: A of an embedding.

    columns: [tokens, padded rank] in the slots' dtype; values: [rank, tokens], or None for rank 0.
    """
    rank = 0 if values is None else len(values)
    if values is not None:
        columns[:, :rank].copy_(values.t())
    columns[:, rank:].zero_()


def _isa(kernel: str | None) -> str | None:
    """The instruction set for the library, or None for torch."""
    best = native.best_isa()
    if kernel is None or kernel == "torch":
        return best if kernel is None else None
    if best is None or kernel not in native.ISAS[: native.ISAS.index(best) + 1]:
        raise ValueError(f"no kernel {kernel!r} here; there is {native.backend()}")
    return kernel


def _check(part: SlotArray, first: Tensor) -> None:
    rows, values = part
    if rows.dim() != 2 or not rows.is_contiguous() or rows.dtype != first.dtype or not rows.is_cpu:
        raise ValueError(f"rows are {tuple(rows.shape)} {rows.dtype}, wanted matrices of one dtype without gaps")
    if values is None:
        return
    if values.dim() != 2 or values.shape[1] != rows.shape[1] or len(values) > len(rows) or not values.is_cpu:
        raise ValueError(f"values are {tuple(values.shape)} on {values.device} for rows of {tuple(rows.shape)}")


def _is_plain(part: SlotArray) -> bool:
    """Whether the library can read the values: a matrix without gaps, or the transpose of one."""
    rows, values = part
    if values is None:
        return rows.dtype in native.DTYPE_NUMBERS
    plain = values.is_contiguous() or values.t().is_contiguous()
    return plain and {values.dtype, rows.dtype} <= native.DTYPE_NUMBERS.keys()


def _words(part: SlotArray) -> tuple[int, ...]:
    """SlotcarFill of lora.h."""
    rows, values = part
    padded, features = rows.shape
    if values is None:
        return 0, 0, 0, rows.data_ptr(), 0, features, padded
    rank, transposed = values.shape[0], not values.is_contiguous()
    dtype = native.DTYPE_NUMBERS[values.dtype]
    return values.data_ptr(), dtype, transposed, rows.data_ptr(), rank, features, padded - rank


def _fill_with_torch(arrays: Sequence[SlotArray]) -> None:
    for rows, values in arrays:
        rank = 0 if values is None else len(values)
        if values is not None:
            rows[:rank].copy_(values)
        rows[rank:].zero_()
