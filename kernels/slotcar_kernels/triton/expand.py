"""The expand: from the planes of the shrink, or an embedding's A, to the output of each row and slice.

Invariant: each element of the output is written by one program, once, from the base's element at the same place; BASE
rows, and those of slots without a delta here, get zeros or the base's bits, or are left as they are (I9).
"""

from __future__ import annotations

import triton
from triton import language as tl

from slotcar_kernels.triton.slices import (
    A_ROW,
    B_ROW,
    BLOCK,
    COLUMN,
    RANKS,
    SCALES,
    WIDTH,
    multiple,
    slice_field,
    slice_start,
)

__all__ = ["ADD", "DELTA", "IN_PLACE", "expand"]

DELTA = tl.constexpr(0)
ADD = tl.constexpr(1)
IN_PLACE = tl.constexpr(2)


@triton.jit(do_not_specialize=["base_stride", "out_stride", "blocks"])
def expand(
    planes,
    ids,
    order,
    tiles,
    counts,
    table,
    like,
    base,
    out,
    base_stride,
    out_stride,
    blocks,
    POSITIONS: tl.constexpr,
    TOKENS: tl.constexpr,
    PLANES: tl.constexpr,
    RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLICES: tl.constexpr,
    MULTIPLE: tl.constexpr,
    MODE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS_STEP: tl.constexpr,
):
    """out[order[p], n] = base[order[p], n] + scale · Σ_r h[p, r] · b[slot, r, n], h[p, r] = Σ_c planes[slice, c, p, r].

    planes: float32 [SLICES, PLANES, POSITIONS, RANK]. With TOKENS h[p, r] = a[slot, ids[order[p]], r], and no planes.
    ids: int32 [rows]; a row whose id is no token's has no delta. order, tiles, counts: of a BatchPlan. table: of
    `slice_table`; like: any pointer of B's type. base, out: [rows, columns of all slices] of one dtype, rows so many
    elements apart; base is read with ADD and IN_PLACE, where it is `out`. blocks: of columns, of all slices.
    MULTIPLE: of elements, which all strides and widths are multiples of, and addresses alike. Sums are float32, rounded
    once.
    """
    items = tl.load(counts + (MODE != IN_PLACE)) * blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item // blocks
        block = item % blocks
        part = tl.full([], 0, dtype=tl.int32)
        for other in tl.static_range(1, SLICES):
            part += (block >= tl.load(table + other * 16 + BLOCK)).to(tl.int32)
        key = tl.load(tiles + tile * 4)
        position = tl.load(tiles + tile * 4 + 1) + tl.arange(0, ROWS)
        live = tl.arange(0, ROWS) < tl.load(tiles + tile * 4 + 2)
        row = tl.load(order + position, live, other=0).to(tl.int64)
        n = (block - tl.load(table + part * 16 + BLOCK)) * COLUMNS + tl.arange(0, COLUMNS)
        inside = n < slice_field(table, part, WIDTH, MULTIPLE)
        place = slice_field(table, part, COLUMN, MULTIPLE) + n
        out_at = out + row[:, None] * multiple(out_stride, MULTIPLE) + place[None, :]
        base_at = base + row[:, None] * multiple(base_stride, MULTIPLE) + place[None, :]
        stored = live[:, None] & inside[None, :]
        slot = tl.maximum(key, 0)
        rank = tl.load(tl.load(table + part * 16 + RANKS).to(counts.dtype) + slot)
        rank = tl.where(key < 0, 0, tl.minimum(rank, RANK))
        if rank > 0:
            b = slice_start(table, part, slot, 1, like, EXPERTS, MULTIPLE)
            if TOKENS > 0:
                token = tl.load(ids + row, live, other=-1)
                live = (token >= 0) & (token < TOKENS)
                a = slice_start(table, part, slot, 0, like, EXPERTS, MULTIPLE)
                h = a + token.to(tl.int64)[:, None] * slice_field(table, part, A_ROW, MULTIPLE)
            else:
                h = planes + ((part * PLANES).to(tl.int64) * POSITIONS + position)[:, None] * RANK
            b_at = b + n[None, :]
            b_row = slice_field(table, part, B_ROW, MULTIPLE)
            delta = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            for first in range(0, rank, RANKS_STEP):
                r = first + tl.arange(0, RANKS_STEP)
                inner = _inner(h, r, rank, live, PLANES, POSITIONS, RANK)
                b_block = tl.load(b_at + r[:, None] * b_row, (r < rank)[:, None] & inside[None, :], other=0.0)
                delta = _product(inner, b_block, delta, PRECISION)
            delta *= tl.load(tl.load(table + part * 16 + SCALES).to(tl.pointer_type(tl.float32)) + slot)
            if MODE != DELTA:
                delta += tl.load(base_at, stored, other=0.0).to(tl.float32)
            tl.store(out_at, _rounded(delta, out.dtype.element_ty, INTERPRETED), stored)
        elif MODE == ADD:
            tl.store(out_at, tl.load(base_at, stored), stored)
        elif MODE == DELTA:
            tl.store(out_at, tl.zeros([ROWS, COLUMNS], dtype=out.dtype.element_ty), stored)


@triton.jit
def _inner(h, r, rank, live, PLANES: tl.constexpr, POSITIONS: tl.constexpr, RANK: tl.constexpr):
    """Σ_c h[c, p, r] in order, float32 [ROWS, ranks]; zero from `rank` on.

    It reads up to the next multiple of 16: a mask at a rank that is loaded would make each element a load of its own.
    """
    padded = tl.multiple_of((rank + 15) // 16 * 16, 16)
    read = live[:, None] & (r < tl.minimum(padded, RANK))[None, :]
    inner = tl.load(h + r[None, :], read, other=0.0).to(tl.float32)
    for plane in tl.static_range(1, PLANES):
        inner += tl.load(h + r[None, :] + plane * POSITIONS * RANK, read, other=0.0)
    return tl.where((r < rank)[None, :], inner, 0.0)


@triton.jit
def _product(h, b, delta, PRECISION: tl.constexpr):
    """delta + h · b to about float32's precision; 16 bits of B are exact in tf32, so that h alone is split in two."""
    wide = b.to(tl.float32)
    if PRECISION == "tf32x3" and b.dtype != tl.float32:
        high = (h.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        low = tl.where(h == high, 0.0, h - high)
        delta = tl.dot(high, wide, delta, input_precision="tf32")
        return tl.dot(low, wide, delta, input_precision="tf32")
    return tl.dot(h, wide, delta, input_precision=PRECISION)


@triton.jit
def _rounded(values, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 to DTYPE, rounded to nearest even, which Triton's interpreter does not do for bfloat16: it cuts."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        moved = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        values = tl.where(values == values, moved, values)
    return values.to(DTYPE)
