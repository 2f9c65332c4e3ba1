"""Where a site's parts lie, as a table on the device that one launch reads for all of them.

A part is one slice of a packed site, such as q of q, k and v: A and B for every slot, and columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

__all__ = ["SLICE_FIELDS", "SlicePart", "slice_table"]

SLICE_FIELDS = 16

A = tl.constexpr(0)
B = tl.constexpr(1)
RANKS = tl.constexpr(2)
SCALES = tl.constexpr(3)
A_SLOT = tl.constexpr(4)
A_EXPERT = tl.constexpr(5)
A_ROW = tl.constexpr(6)
B_SLOT = tl.constexpr(7)
B_EXPERT = tl.constexpr(8)
B_ROW = tl.constexpr(9)
COLUMN = tl.constexpr(10)
WIDTH = tl.constexpr(11)
BLOCK = tl.constexpr(12)


@dataclass(frozen=True, slots=True, eq=False)
class SlicePart:
    """One part of a site, for every slot, on the device.

    a: [S, R, in], with experts [S, E, R, in], of an embedding [S, tokens, R]. b: B transposed, [S, R, out], with
    experts [S, E, R, out]. Any strides whose last is 1, and one dtype. What lies from a slot's rank on does not matter.
    ranks: int32 [S · E], at most R; 0 means no delta. scales: float32 [S · E]. Kernels read both when they run.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        return self.b.shape[-1]

    @property
    def max_rank(self) -> int:
        return self.b.shape[-2]

    @property
    def experts(self) -> int:
        return self.b.shape[1] if self.b.dim() == 4 else 1


def slice_table(parts: Sequence[SlicePart], block: int) -> tuple[Tensor, int]:
    """int64 [parts, SLICE_FIELDS] on the parts' device, and how many blocks of columns they have; not padded.

    Addresses in bytes, strides in elements, the first column of the output, the width, and the first block.
    """
    table, column, first = [], 0, 0
    for part in parts:
        experts = part.b.dim() == 4
        table.append(
            [
                *(tensor.data_ptr() for tensor in (part.a, part.b, part.ranks, part.scales)),
                *(part.a.stride(0), part.a.stride(1) if experts else 0, part.a.stride(-2)),
                *(part.b.stride(0), part.b.stride(1) if experts else 0, part.b.stride(-2)),
                *(column, part.out_features, first),
                *(0,) * 3,
            ]
        )
        column += part.out_features
        first += triton.cdiv(part.out_features, block)
    return torch.tensor(table, dtype=torch.int64, device=parts[0].a.device), first


@triton.jit
def multiple(number, MULTIPLE: tl.constexpr):
    """The number, which the host has found to be a multiple; `tl.multiple_of` has no effect on a kernel's argument."""
    return number // MULTIPLE * MULTIPLE


@triton.jit
def slice_field(table, part, FIELD: tl.constexpr, MULTIPLE: tl.constexpr):
    """A number of a part's line; MULTIPLE is what the host has found all such numbers to be multiples of."""
    return tl.multiple_of(tl.load(table + part * 16 + FIELD), MULTIPLE)


@triton.jit
def slice_start(table, part, key, FIELDS: tl.constexpr, like, EXPERTS: tl.constexpr, MULTIPLE: tl.constexpr):
    """Where A (FIELDS 0) or B (1) of a slot and expert begins, as a pointer of the type of `like`.

    MULTIPLE: of elements, which the strides are multiples of; above 1, addresses are multiples of 16 bytes.
    """
    slot = (key // EXPERTS).to(tl.int64)
    expert = (key % EXPERTS).to(tl.int64)
    strides: tl.constexpr = A_SLOT + 3 * FIELDS
    start = slot * slice_field(table, part, strides, MULTIPLE)
    if EXPERTS > 1:
        start += expert * slice_field(table, part, strides + 1, MULTIPLE)
    address = tl.load(table + part * 16 + FIELDS).to(like.dtype)
    if MULTIPLE > 1:
        address = tl.multiple_of(address, 16)
    return address + start
