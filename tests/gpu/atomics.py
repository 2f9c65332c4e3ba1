"""What slotcar is measured against: LoRA with a split K that atomics add up, in the style of common engines.

Rows are sorted by adapter on the host; a grid has a program for every adapter, tile of rows and split, whether the
adapter has such a tile or not; the shrink adds its splits to a buffer that was set to zero before, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton import language as tl

__all__ = ["SETTINGS", "Setting", "add"]


@dataclass(frozen=True)
class Setting:
    """Of the shrink: into how many splits K goes, and how many features a program multiplies at once."""

    split: int
    step: int

    @property
    def name(self) -> str:
        return f"{self.split} × {self.step}"


# Many splits for few rows, few for many: an engine chooses by the number of rows; here the fastest counts.
SETTINGS = (Setting(64, 64), Setting(16, 256), Setting(8, 128))

SHRINK_ROWS, SHRINK_RANKS = 32, 16
EXPAND_ROWS, EXPAND_COLUMNS, EXPAND_RANKS = 64, 128, 16


@triton.jit
def shrink(
    x,
    a,
    inner,
    order,
    starts,
    x_stride,
    a_slot,
    a_row,
    scale,
    FEATURES: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """inner[p, r] += scale · Σ_k x[order[p], k] · a[slot, r, k] over the k of a split; float32 [rows, RANK]."""
    BLOCKS: tl.constexpr = (RANK + RANKS - 1) // RANKS
    program = tl.program_id(0)
    slot = tl.program_id(1)
    split = program % SPLIT
    r = program // SPLIT % BLOCKS * RANKS + tl.arange(0, RANKS)
    start = tl.load(starts + slot) + program // (SPLIT * BLOCKS) * ROWS
    stop = tl.load(starts + slot + 1)
    if start < stop:
        position = start + tl.arange(0, ROWS)
        live = position < stop
        row = tl.load(order + position, live, other=0).to(tl.int64)
        total = tl.zeros([ROWS, RANKS], dtype=tl.float32)
        for first in range(split * STEP, FEATURES, SPLIT * STEP):
            k = first + tl.arange(0, STEP)
            inside = k < FEATURES
            x_block = tl.load(x + row[:, None] * x_stride + k[None, :], live[:, None] & inside[None, :], other=0.0)
            a_rows = a + slot.to(tl.int64) * a_slot + r[:, None] * a_row
            a_block = tl.load(a_rows + k[None, :], (r < RANK)[:, None] & inside[None, :], other=0.0)
            if WIDE:
                x_block = x_block.to(tl.float32)
                a_block = a_block.to(tl.float32)
            total = tl.dot(x_block, tl.trans(a_block), total)
        stored = live[:, None] & (r < RANK)[None, :]
        tl.atomic_add(inner + position[:, None] * RANK + r[None, :], total * scale, stored, sem="relaxed")


@triton.jit
def expand(
    inner,
    b,
    out,
    order,
    starts,
    out_stride,
    b_slot,
    b_row,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[order[p], n] += Σ_r inner[p, r] · b[slot, r, n], inner rounded to B's dtype."""
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    slot = tl.program_id(1)
    n = program % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(starts + slot) + program // BLOCKS * ROWS
    stop = tl.load(starts + slot + 1)
    if start < stop:
        position = start + tl.arange(0, ROWS)
        live = position < stop
        row = tl.load(order + position, live, other=0).to(tl.int64)
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for first in range(0, RANK, RANKS):
            r = first + tl.arange(0, RANKS)
            h = tl.load(inner + position[:, None] * RANK + r[None, :], live[:, None] & (r < RANK)[None, :], other=0.0)
            b_rows = b + slot.to(tl.int64) * b_slot + r[:, None] * b_row
            b_block = tl.load(b_rows + n[None, :], (r < RANK)[:, None] & (n < WIDTH)[None, :], other=0.0)
            h = h.to(b_block.dtype)
            if WIDE:
                h = h.to(tl.float32)
                b_block = b_block.to(tl.float32)
            total = tl.dot(h, b_block, total)
        at = out + row[:, None] * out_stride + n[None, :]
        stored = live[:, None] & (n < WIDTH)[None, :]
        tl.store(at, (total + tl.load(at, stored, other=0.0).to(tl.float32)).to(out.dtype.element_ty), stored)


def add(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, float],
    out: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    inner: torch.Tensor,
    setting: Setting,
) -> None:
    """out += scale · (x Aᵀ) Bᵀ in three launches; `rows` are int32 order [rows] and starts [slots + 1]."""
    (a, b, scale), (order, starts), rank = weights, rows, inner.shape[1]
    wide = bool(triton.knobs.runtime.interpret)
    inner.zero_()
    tiles, blocks = triton.cdiv(len(x), SHRINK_ROWS), triton.cdiv(rank, SHRINK_RANKS)
    shrink[(setting.split * blocks * tiles, len(a))](
        *(x, a, inner, order, starts, x.stride(0), a.stride(0), a.stride(1), scale),
        FEATURES=x.shape[1],
        RANK=rank,
        ROWS=SHRINK_ROWS,
        RANKS=SHRINK_RANKS,
        STEP=setting.step,
        SPLIT=setting.split,
        WIDE=wide,
        num_warps=4,
        num_stages=2,
    )
    tiles, blocks = triton.cdiv(len(x), EXPAND_ROWS), triton.cdiv(out.shape[1], EXPAND_COLUMNS)
    expand[(blocks * tiles, len(b))](
        *(inner, b, out, order, starts, out.stride(0), b.stride(0), b.stride(1)),
        WIDTH=out.shape[1],
        RANK=rank,
        ROWS=EXPAND_ROWS,
        COLUMNS=EXPAND_COLUMNS,
        RANKS=EXPAND_RANKS,
        WIDE=wide,
        num_warps=4,
        num_stages=2,
    )
