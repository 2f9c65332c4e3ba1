"""Batches and slots for kernel tests, poisoned so that reading or writing the wrong place shows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from slotcar_kernels.sites import SiteSlots

Entries = list[tuple[int | None, int]]

MAX_RANK = 32
RANKS = (16, 1, 7, 17, MAX_RANK, 0, 16, 3)
USED_SLOTS = len(RANKS)
SLOTS = USED_SLOTS + 1  # the last one is never filled

POPULARITIES = ("distinct", "uniform", "zipf", "identical", "skewed")


def entries_of(popularity: str, count: int, *, base: float = 0.0, ragged: bool = False, seed: int = 0) -> Entries:
    """`count` entries over the used slots; a part `base` of them is BASE; `ragged` ones have 0 to 9 rows, not 1."""
    rng = random.Random(f"{popularity} {count} {base} {ragged} {seed}")
    choose = {
        "distinct": lambda index: index % USED_SLOTS,
        "uniform": lambda index: rng.randrange(USED_SLOTS),
        "zipf": lambda index: rng.choices(range(USED_SLOTS), [1 / (slot + 1) for slot in range(USED_SLOTS)])[0],
        "identical": lambda index: 4,
        "skewed": lambda index: 3 if rng.random() < 0.9 else rng.randrange(USED_SLOTS),
    }[popularity]
    return [
        (None if rng.random() < base else choose(index), rng.randrange(10) if ragged else 1) for index in range(count)
    ]


def rows_of(entries: Entries) -> int:
    return sum(count for _, count in entries)


def site_slots(
    in_features: int,
    out_features: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    ranks: Sequence[int] = RANKS,
) -> SiteSlots:
    """Slots of these ranks; NaN at and above each rank, and in one slot more, which is never filled."""
    generator = torch.Generator().manual_seed(seed)
    max_rank = max(MAX_RANK, *ranks)
    a = torch.full((len(ranks) + 1, max_rank, in_features), math.nan)
    b = torch.full((len(ranks) + 1, max_rank, out_features), math.nan)
    for slot, rank in enumerate(ranks):
        a[slot, :rank] = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        b[slot, :rank] = torch.randn(rank, out_features, generator=generator) * max(rank, 1) ** -0.5
    scales = [0.25 + slot for slot in range(len(ranks))]
    return SiteSlots(a.to(dtype), b.to(dtype), (*ranks, max_rank), (*scales, math.nan))


@dataclass(frozen=True)
class Padded:
    """A [rows, columns] view into a larger buffer whose other elements are NaN."""

    view: torch.Tensor
    buffer: torch.Tensor
    mask: torch.Tensor

    def assert_rest_untouched(self) -> None:
        assert self.buffer[~self.mask].isnan().all(), "written outside of the result"


def padded(values: torch.Tensor, *, gap: int = 5, offset: int = 3) -> Padded:
    """`values` as a view with a gap behind each row, an odd offset before the first and a tail behind the last."""
    rows, columns = values.shape
    buffer = torch.full((offset + (rows + 2) * (columns + gap),), math.nan, dtype=values.dtype)
    view = buffer[offset:].as_strided((rows, columns), (columns + gap, 1), offset)
    view.copy_(values)
    mask = torch.zeros(buffer.shape, dtype=torch.bool)
    mask.as_strided((rows, columns), (columns + gap, 1), offset).fill_(True)
    return Padded(view, buffer, mask)
