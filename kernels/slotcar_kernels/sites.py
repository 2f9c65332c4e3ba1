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

    With experts, `a` is [S, E, R, in] and `b` [S, E, R, out], and what is called slot above is slot · E + expert.
    For an `embedding`, `a` is [S, tokens, R], and a row has the id of its token: delta = scales[s] · a[s, id] b[s].
    """

    a: Tensor
    b: Tensor
    ranks: Sequence[int]
    scales: Sequence[float]
    embedding: bool = False

    @property
    def in_features(self) -> int:
        """Width of x; of an embedding the number of tokens."""
        return self.a.shape[-2] if self.embedding else self.a.shape[-1]

    @property
    def out_features(self) -> int:
        return self.b.shape[-1]

    @property
    def max_rank(self) -> int:
        return self.b.shape[-2]

    @property
    def experts(self) -> int:
        """How many pairs of A and B each slot has."""
        return self.b.shape[1] if self.b.dim() == 4 else 1

    @property
    def count(self) -> int:
        """How many slots there are, experts counted."""
        return self.b.shape[0] * self.experts

    def matrices(self, slot: int) -> tuple[Tensor, Tensor]:
        """A [rank, in], of an embedding [tokens, rank], and B transposed [rank, out] of a slot."""
        rank, at = self.ranks[slot], divmod(slot, self.experts) if self.b.dim() == 4 else (slot,)
        a, b = self.a[at], self.b[at]
        return (a[:, :rank] if self.embedding else a[:rank]), b[:rank]
