"""The shrink: from rows of x to their products with A, of each slice and of each plane of features.

Invariant: each element of the planes that the expand reads is written by one program, which sums in one order whatever
else is in the batch: no atomics, and nothing to set to zero before.
"""

from __future__ import annotations

import triton
from triton import language as tl

from slotcar_kernels.triton.slices import A_ROW, RANKS, multiple, slice_field, slice_start

__all__ = ["shrink"]


@triton.jit(do_not_specialize=["x_stride"])
def shrink(
    x,
    order,
    tiles,
    counts,
    table,
    like,
    planes,
    x_stride,
    POSITIONS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLICES: tl.constexpr,
    MULTIPLE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    PLANE: tl.constexpr,
    STEP: tl.constexpr,
    RANKS_STEP: tl.constexpr,
):
    """planes[slice, c, p, r] = Σ_k x[order[p], k] · a[slot, r, k], k from c · PLANE to (c + 1) · PLANE, r < rank.

    x: [rows, FEATURES], rows `x_stride` elements apart. order, tiles, counts: of a BatchPlan. table: of `slice_table`;
    like: any pointer of A's type. planes: float32 [SLICES, planes, POSITIONS, RANK], written up to the next multiple of
    16 above the rank of a row's slot. WIDE: products in float32, as PRECISION says, else in the dtype of x and A.
    MULTIPLE: of elements, which all strides are multiples of, and addresses alike. Sums are float32.
    """
    PLANES: tl.constexpr = (FEATURES + PLANE - 1) // PLANE
    items = tl.load(counts) * (PLANES * SLICES)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item // (PLANES * SLICES)
        plane = item // SLICES % PLANES
        part = item % SLICES
        key = tl.load(tiles + tile * 4)
        start = tl.load(tiles + tile * 4 + 1)
        i = tl.arange(0, ROWS)
        live = i < tl.load(tiles + tile * 4 + 2)
        row = tl.load(order + start + i, live, other=0).to(tl.int64)
        rank = tl.load(tl.load(table + part * 16 + RANKS).to(counts.dtype) + key)
        rank = tl.minimum(rank, RANK)
        a = slice_start(table, part, key, 0, like, EXPERTS, MULTIPLE)
        a_row = slice_field(table, part, A_ROW, MULTIPLE)
        x_rows = x + row[:, None] * multiple(x_stride, MULTIPLE)
        for first in range(0, rank, RANKS_STEP):
            r = first + tl.arange(0, RANKS_STEP)
            a_rows = a + r[:, None] * a_row
            inner = tl.zeros([ROWS, RANKS_STEP], dtype=tl.float32)
            for step in range(0, PLANE, STEP):
                k = plane * PLANE + step + tl.arange(0, STEP)
                inside = k < FEATURES
                x_block = tl.load(x_rows + k[None, :], live[:, None] & inside[None, :], other=0.0)
                a_block = tl.load(a_rows + k[None, :], (r < rank)[:, None] & inside[None, :], other=0.0)
                if WIDE:
                    x_block = x_block.to(tl.float32)
                    a_block = a_block.to(tl.float32)
                inner = tl.dot(x_block, tl.trans(a_block), inner, input_precision=PRECISION)
            padded = tl.multiple_of((rank + 15) // 16 * 16, 16)
            position = (part * PLANES + plane).to(tl.int64) * POSITIONS + start + i
            stored = live[:, None] & (r < padded)[None, :]
            tl.store(planes + position[:, None] * RANK + r[None, :], inner, stored)
