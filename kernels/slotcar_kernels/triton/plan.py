"""The plan of a batch, made on the device: rows sorted by slot into tiles of one slot, with their count.

Invariant: every live row is in exactly one tile, and a tile's rows are of one slot, and expert; if anything that the
device reads is out of range, the counts are 0, so that nothing is computed and nothing written.

    slots   7 7 -1 3 7        order  3 0 1 4 2        tiles (key, start, length)   (3, 0, 1) (7, 1, 3) (-1, 4, 1)
    rows    5                                         counts (2, 3): tiles of slots, and with those of BASE behind them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton import language as tl

from slotcar_kernels.triton.tiles import PLAN, rows_for

__all__ = ["BatchPlan", "warp_size"]

_TILE_FIELDS = 4  # key, start, length and one that is 0: a tile is one load of 16 bytes
_SEGMENT_FIELDS = 4  # of a position: key, row's place in its segment, the segment's length, 0

_BASE = tl.constexpr(2**31 - 2)  # sorts behind every slot
_NO_ROW = tl.constexpr(2**31 - 1)  # and this behind BASE


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """The buffers of one token bucket, whose addresses stay: `write` fills them, `execute` launches.

    rows: int32 [1], number of live rows. slots: int32 [bucket], slot of each row, -1 for BASE; those from `rows` on
    have no meaning. order: int32 [bucket], position → row. tiles: int32 [bucket, 4]. counts: int32 [2].
    faults: int32 [programs], how many rows have something out of range; read it after the work is complete.
    aux: of a routed plan, int32 [bucket]: `limit` is how many tokens, or experts, there are.
    """

    bucket: int
    slot_count: int
    experts: int
    limit: int
    rows: Tensor
    slots: Tensor
    aux: Tensor | None
    keys: Tensor
    order: Tensor
    segments: Tensor
    tiles: Tensor
    counts: Tensor
    faults: Tensor

    @classmethod
    def of_bucket(cls, bucket: int, slot_count: int, device: torch.device) -> BatchPlan:
        """A plan for at most `bucket` rows over `slot_count` slots. Raises ValueError for a bucket without rows."""
        if bucket < 1 or slot_count < 1:
            raise ValueError(f"a bucket of {bucket} rows over {slot_count} slots, wanted at least one of each")
        rows = torch.zeros(1, dtype=torch.int32, device=device)
        slots = torch.full((bucket,), -1, dtype=torch.int32, device=device)
        return cls(bucket, slot_count, 1, 0, rows, slots, None, *_buffers(bucket, device))

    def routed(self, aux: Tensor, limit: int, experts: int = 1) -> BatchPlan:
        """A plan of the same rows by aux: int32 [bucket, 1], below `limit`; with experts, by slot and expert.

        It reads what this plan was given. Raises ValueError when aux does not fit.
        """
        if aux.shape != (self.bucket, 1) or aux.dtype != torch.int32 or aux.device != self.rows.device:
            found = f"{tuple(aux.shape)} {aux.dtype} on {aux.device}"
            raise ValueError(f"aux is {found}, wanted {(self.bucket, 1)} int32 on {self.rows.device}")
        if self.bucket > 1 and aux.stride(0) != 1:
            raise ValueError(f"aux has strides {aux.stride()}, wanted one number behind the other")
        keys, order, segments, tiles, counts, faults = _buffers(self.bucket, self.rows.device)
        return replace(
            self,
            experts=experts,
            limit=limit,
            aux=aux,
            keys=keys,
            order=order,
            segments=segments,
            tiles=tiles,
            counts=counts,
            faults=faults,
        )

    @property
    def max_tiles(self) -> int:
        """How many tiles a batch can have: each slot's last may be a part of one, and so may BASE's."""
        keys = min(self.bucket, self.slot_count * self.experts + 1)
        return min(self.bucket, self.bucket // rows_for(self.bucket) + keys)

    def write(self, slots: Sequence[int] | Tensor, staging: Tensor | None = None) -> None:
        """Says which slot each row of the next batch uses, -1 for BASE; enqueues copies, and launches nothing.

        slots: on the host. staging: int32 [bucket + 1] in pinned memory, which must stay as it is until the copies are
        complete. Raises ValueError for more rows than the bucket, or a slot that is none; then nothing was written.
        """
        count = len(slots)
        if count > self.bucket:
            raise ValueError(f"{count} rows, wanted at most the bucket's {self.bucket}")
        by_row = torch.as_tensor(slots, dtype=torch.int64)
        low, high = map(int, torch.aminmax(by_row)) if count else (-1, -1)
        if low < -1 or high >= self.slot_count:
            raise ValueError(f"slots {low} to {high}, wanted -1 to {self.slot_count - 1}")
        given = torch.empty(self.bucket + 1, dtype=torch.int32) if staging is None else staging
        given[0] = count
        given[1 : count + 1] = by_row
        given[count + 1 :] = -1
        self.rows.copy_(given[:1], non_blocking=staging is not None)
        self.slots.copy_(given[1:], non_blocking=staging is not None)

    def execute(self) -> None:
        """Writes order, tiles, counts and faults from what rows, slots and aux are then."""
        for kernel, (_, arguments, constants) in zip((write_keys, sort_rows, cut_tiles), self.launches(), strict=True):
            kernel[self._programs,](*arguments, **constants)

    def launches(self) -> list[tuple[str, tuple[Tensor, ...], dict[str, int]]]:
        """Name, arguments and constants of each kernel, in their order."""
        common = {"BUCKET": self.bucket, "BLOCK": PLAN.width, "num_warps": PLAN.threads // warp_size()}
        limits = {"SLOTS": self.slot_count, "EXPERTS": self.experts, "LIMIT": self.limit}
        aux = self.slots if self.aux is None else self.aux
        sizes = {"ROWS": rows_for(self.bucket), "PROGRAMS": triton.next_power_of_2(self._programs)}
        return [
            ("write_keys", (self.slots, aux, self.rows, self.keys, self.faults), limits | common),
            ("sort_rows", (self.keys, self.order, self.segments), common),
            ("cut_tiles", (self.segments, self.faults, self.tiles, self.counts), sizes | common),
        ]

    @property
    def _programs(self) -> int:
        return len(self.faults)


def warp_size() -> int:
    """Threads of a warp, of which a launch has a number."""
    return 64 if torch.version.hip else 32


def _buffers(bucket: int, device: torch.device) -> tuple[Tensor, ...]:
    """keys, order, segments, tiles, counts and faults."""
    programs = triton.cdiv(bucket, PLAN.width)
    shapes = ((bucket,), (bucket,), (bucket, _SEGMENT_FIELDS), (bucket, _TILE_FIELDS), (2,), (programs,))
    return tuple(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)


@triton.jit
def write_keys(
    slots,
    aux,
    rows,
    keys,
    faults,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    LIMIT: tl.constexpr,
    BUCKET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """key = slot · EXPERTS + expert of each live row, _BASE for BASE; reads each number once, and counts bad ones.

    slots, aux, keys: int32 [BUCKET]; aux is read when LIMIT is not 0. rows: int32 [1]. faults: int32 [programs].
    """
    program = tl.program_id(0)
    row = program * BLOCK + tl.arange(0, BLOCK)
    live = row < tl.minimum(tl.load(rows), BUCKET)
    slot = tl.load(slots + row, live, other=-1)
    bad = live & ((slot < -1) | (slot >= SLOTS))
    key = slot
    if LIMIT > 0:
        index = tl.load(aux + row, live, other=0)
        bad = bad | (live & ((index < 0) | (index >= LIMIT)))
        if EXPERTS > 1:
            key = slot * EXPERTS + index
    key = tl.where(bad | (slot < 0), _BASE, key)
    tl.store(keys + row, tl.where(live, key, _NO_ROW), row < BUCKET)
    tl.store(faults + program, tl.sum(bad.to(tl.int32), 0))


@triton.jit
def sort_rows(keys, order, segments, BUCKET: tl.constexpr, BLOCK: tl.constexpr):
    """order[#{r' : (key[r'], r') < (key[r], r)}] = r: a stable counting sort, in which no program waits for another.

    keys, order: int32 [BUCKET]. segments: int32 [BUCKET, 4], by position: key, place in its segment, segment's length.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row, row < BUCKET, other=_NO_ROW)
    smaller = tl.zeros([BLOCK], dtype=tl.int32)
    before = tl.zeros([BLOCK], dtype=tl.int32)
    equal = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, BUCKET, BLOCK):
        other_row = first + tl.arange(0, BLOCK)
        other = tl.load(keys + other_row, other_row < BUCKET, other=_NO_ROW)
        same = other[None, :] == key[:, None]
        smaller += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
        before += tl.sum((same & (other_row[None, :] < row[:, None])).to(tl.int32), 1)
        equal += tl.sum(same.to(tl.int32), 1)
    position = smaller + before
    stored = row < BUCKET
    tl.store(order + position, row, stored)
    tl.store(segments + position * 4, key, stored)
    tl.store(segments + position * 4 + 1, before, stored)
    tl.store(segments + position * 4 + 2, equal, stored)


@triton.jit
def cut_tiles(
    segments,
    faults,
    tiles,
    counts,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BUCKET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """tiles[i] = (key, start, length) of the i-th run of at most ROWS positions with one key; -1 is BASE's key.

    segments: int32 [BUCKET, 4] of `sort_rows`. tiles: int32 [BUCKET, 4]. counts: int32 [2], zeros if there are faults.
    """
    program = tl.program_id(0)
    earlier = 0
    for first in range(0, program * BLOCK, BLOCK):
        _, _, _, starts = _starts(segments, first, ROWS, BUCKET, BLOCK)
        earlier += tl.sum(starts.to(tl.int32), 0)
    key, place, length, starts = _starts(segments, program * BLOCK, ROWS, BUCKET, BLOCK)
    tile = earlier + tl.cumsum(starts.to(tl.int32), 0) - 1
    position = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(tiles + tile * 4, tl.where(key == _BASE, -1, key), starts)
    tl.store(tiles + tile * 4 + 1, position, starts)
    tl.store(tiles + tile * 4 + 2, tl.minimum(length - place, ROWS), starts)
    if program == tl.num_programs(0) - 1:
        every = earlier + tl.sum(starts.to(tl.int32), 0)
        of_base = 0
        for first in range(0, BUCKET, BLOCK):
            key, _, _, starts = _starts(segments, first, ROWS, BUCKET, BLOCK)
            of_base += tl.sum((starts & (key == _BASE)).to(tl.int32), 0)
        index = tl.arange(0, PROGRAMS)
        bad = tl.sum(tl.load(faults + index, index < tl.num_programs(0), other=0), 0)
        tl.store(counts, tl.where(bad > 0, 0, every - of_base))
        tl.store(counts + 1, tl.where(bad > 0, 0, every))


@triton.jit
def _starts(segments, first, ROWS: tl.constexpr, BUCKET: tl.constexpr, BLOCK: tl.constexpr):
    """key, place and length of the positions from `first` on, and whether a tile starts there."""
    position = first + tl.arange(0, BLOCK)
    there = position < BUCKET
    key = tl.load(segments + position * 4, there, other=_NO_ROW)
    place = tl.load(segments + position * 4 + 1, there, other=0)
    length = tl.load(segments + position * 4 + 2, there, other=0)
    return key, place, length, (key != _NO_ROW) & (place % ROWS == 0)
