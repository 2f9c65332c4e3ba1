"""The truth that kernels are tested against: row by row, slow, and in any dtype up to float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slotcar_kernels.sites import SiteSlots

__all__ = ["lora_delta", "lora_rows"]


def lora_delta(x: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """delta = scale · (x Aᵀ) Bᵀ, as PEFT's LoRA layer computes it, one row at a time.

    x [rows, in], a [rank, in], b [out, rank] in any dtypes; returns [rows, out] in `dtype`, in which all is computed.
    """
    delta = torch.zeros(x.shape[0], b.shape[0], dtype=dtype)
    for row in range(x.shape[0]):
        delta[row] = b.to(dtype) @ (a.to(dtype) @ x[row].to(dtype)) * scale
    return delta


def lora_rows(
    entries: Sequence[tuple[int | None, int]],
    x: Tensor,
    site: SiteSlots,
    base: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """out = base + scales[s] · (x a[s]ᵀ) b[s] for a row of slot s, and base for a BASE row; base is 0 where not given.

    For an embedding x is [rows], ids, and the delta is scales[s] · a[s, id] b[s].
    Takes the entries, (slot or None for BASE, number of rows), and not a plan, so that a wrong plan shows. x [rows, in]
    and base [rows, out] in any dtypes; returns [rows, out] in `dtype`, not rounded to x's.
    """
    slots = [slot for slot, count in entries for _ in range(count)]
    if len(slots) != x.shape[0]:
        raise ValueError(f"the entries have {len(slots)} rows, x has {x.shape[0]}")
    out = torch.zeros(len(slots), site.out_features, dtype=dtype) if base is None else base.to(dtype, copy=True)
    for row, slot in enumerate(slots):
        rank = 0 if slot is None else site.ranks[slot]
        if slot is not None and rank:
            a, b = site.matrices(slot)
            given = a[x[row]].to(dtype)[None] if site.embedding else x[row : row + 1]
            a = torch.eye(rank, dtype=dtype) if site.embedding else a
            out[row] += lora_delta(given, a, b.t(), site.scales[slot], dtype)[0]
    return out
