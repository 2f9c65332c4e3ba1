"""Tile choices of the GPU kernels: all of them, as data, chosen by token bucket and dtype, never by batch.

A row's bits depend on the tiles of its bucket, and on nothing else of the batch it is in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["BUCKETS", "MAX_RANK", "MOST_ROWS", "PLAN", "RANK_STEP", "Block", "Tiles", "rows_for", "tiles_for"]

BUCKETS = (16, 64, 256, 1024)
"""The token buckets of whoever has a choice: with the same ones, all give a row the same bits."""
MOST_ROWS = BUCKETS[-1]
"""Longer batches are computed piece by piece."""

MAX_RANK = 256
RANK_STEP = 16
"""What ranks are rounded up to inside the kernels: the least that a tensor core's product takes."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one program of a kernel computes in a step, in elements, and how it runs.

    width: features of a shrink, columns of an expand, rows of a plan. ranks: at most. programs: per multiprocessor, at
    most.
    """

    width: int
    ranks: int
    threads: int
    stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """A tile has at most `rows` rows of one slot.

    plane: features that one program of the shrink sums, None for all of them; each is a plane of its own, which the
    expand adds up in order. embed: the expand of an embedding, which reads A instead.
    """

    rows: int
    plane: int | None
    shrink: Block
    expand: Block
    embed: Block


# A decode step reads every weight once, for a few rows each: many small programs keep the memory busy. The expand has
# as many threads as 16 rows of 16 ranks in float32 give 16 bytes each; an embedding's A has twice the ranks for that.
_DECODE = Tiles(
    rows=16,
    plane=512,
    shrink=Block(width=128, ranks=32, threads=128, stages=3, programs=8),
    expand=Block(width=128, ranks=16, threads=64, stages=3, programs=16),
    embed=Block(width=64, ranks=32, threads=64, stages=2, programs=16),
)

# Many rows for each weight: larger tiles read a slot less often, and rows alone fill the machine.
_PREFILL = Tiles(
    rows=64,
    plane=None,
    shrink=Block(width=128, ranks=64, threads=256, stages=3, programs=2),
    expand=Block(width=128, ranks=16, threads=256, stages=3, programs=2),
    embed=Block(width=64, ranks=32, threads=256, stages=2, programs=4),
)

# Products in float32 take three of the tensor cores' each, and twice the registers and the shared memory.
_DECODE_WIDE = Tiles(
    rows=_DECODE.rows,
    plane=_DECODE.plane,
    shrink=Block(width=64, ranks=32, threads=128, stages=3, programs=8),
    expand=Block(width=64, ranks=16, threads=64, stages=3, programs=16),
    embed=Block(width=64, ranks=16, threads=64, stages=3, programs=16),
)
_PREFILL_WIDE = Tiles(
    rows=_PREFILL.rows,
    plane=_PREFILL.plane,
    shrink=Block(width=32, ranks=32, threads=128, stages=3, programs=4),
    expand=Block(width=64, ranks=16, threads=256, stages=3, programs=2),
    embed=Block(width=64, ranks=16, threads=256, stages=3, programs=2),
)

PLAN = Block(width=64, ranks=0, threads=256, stages=1, programs=0)

_DECODE_ROWS = 512
_ODD_WIDTH = 32


def tiles_for(bucket: int, is_wide: bool = False, is_aligned: bool = True) -> Tiles:
    """The tiles of all batches of a token bucket; wide ones where products are in float32.

    Where rows are not aligned, every element is a load with an address of its own: fewer of them fit into registers.
    """
    narrow, wide = (_DECODE, _DECODE_WIDE) if bucket <= _DECODE_ROWS else (_PREFILL, _PREFILL_WIDE)
    tiles = wide if is_wide else narrow
    if is_aligned:
        return tiles
    shrink, expand, embed = (replace(block, width=_ODD_WIDTH) for block in (tiles.shrink, tiles.expand, tiles.embed))
    return replace(tiles, shrink=shrink, expand=expand, embed=embed)


def rows_for(bucket: int) -> int:
    """How many rows a tile of the bucket has at most, whatever its dtypes."""
    return tiles_for(bucket).rows
