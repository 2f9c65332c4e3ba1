"""What slots with vectors add to the rows of a site beside their LoRA, on any device, by operations of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slotcar_kernels.seed import BIAS, GAIN

__all__ = ["Moved", "move"]


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A part whose slots have vectors: its columns, [S, 2, out] float32, and the flags of the slots that have some."""

    columns: slice
    vectors: Tensor
    flags: Mapping[int, int]


def move(moved: Moved, slots: Sequence[int], out: Tensor, y: Tensor) -> None:
    """out += gain[s] ⊙ y + bias[s] for the rows of slots with vectors, in float32, rounded once.

    slots: of each row, -1 for BASE. out: [rows, out], the part's columns. y: [rows, out], the base's output, or `out`.
    """
    chosen = [(row, slot, moved.flags[slot]) for row, slot in enumerate(slots) if moved.flags.get(slot)]
    if not chosen:
        return
    rows, of_slots, flags = torch.tensor(chosen).to(out.device).unbind(1)
    vectors = moved.vectors.index_select(0, of_slots)
    gain, bias = ((flags & bit).bool()[:, None] for bit in (GAIN, BIAS))
    by = torch.where(bias, vectors[:, 1], 0.0) + torch.where(gain, vectors[:, 0] * y[rows].float(), 0.0)
    out[rows] = (out[rows].float() + by).to(out.dtype)
