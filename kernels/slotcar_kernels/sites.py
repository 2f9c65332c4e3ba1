"""The slots of one site as kernels see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["SiteSlots"]


@dataclass(frozen=True, slots=True, eq=False)
class SiteSlots:
    """delta = scales[s] · (x a[s, :ranks[s]]ᵀ) b[s, :ranks[s]] for the rows of slot s.

    `a` is [S, R, in] and `b`, B transposed, [S, R, out], of one dtype; `ranks` and `scales` have S values. What lies at
    or above a slot's rank is never read; rank 0 means that the slot has no delta here.
    """

    a: Tensor
    b: Tensor
    ranks: Sequence[int]
    scales: Sequence[float]

    @property
    def in_features(self) -> int:
        return self.a.shape[2]

    @property
    def out_features(self) -> int:
        return self.b.shape[2]
