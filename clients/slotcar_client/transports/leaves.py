"""The leaves of a model's slots: what each site has arrays for, and the views of them that one rank computes with."""

from __future__ import annotations

from typing import NamedTuple

from slotcar.shm.slots import BIAS, LeafShape, shard
from slotcar.v1 import model_pb2
from torch import Tensor

from slotcar_client.sites import site_parts

__all__ = ["Leaf", "RankLeaves", "leaf_shapes", "leaves_by_site"]


class Leaf(NamedTuple):
    """One part of a site; `number` is its place in the slots, `copies` how many neighbouring ranks share a shard."""

    number: int
    shape: LeafShape
    shard: int
    copies: int


class RankLeaves(NamedTuple):
    """Views for one of `ranks`. A column shard is of the output, a row shard of the input; A and B end with these."""

    rank: int
    ranks: int

    def a(self, leaf: Leaf, a: Tensor) -> Tensor:
        if leaf.shard != model_pb2.SHARD_ROW:
            return a
        start, end = shard(leaf.shape.in_features, self.rank, self.ranks)
        return a[..., start:end]

    def b(self, leaf: Leaf, b: Tensor) -> Tensor:
        if leaf.shard != model_pb2.SHARD_COLUMN:
            return b
        start, end = shard(leaf.shape.out_features, self.rank, self.ranks, leaf.copies)
        return b[..., start:end]

    def vectors(self, leaf: Leaf, vectors: Tensor) -> Tensor:
        return self.b(leaf, vectors)

    def flags(self, leaf: Leaf, flags: int) -> int:
        """The engine sums the outputs of row shards: only one of them has the bias."""
        return flags & ~BIAS if leaf.shard == model_pb2.SHARD_ROW and self.rank else flags


def leaf_shapes(spec: model_pb2.ModelSpec) -> list[LeafShape]:
    """In the order of the slots."""
    return [leaf.shape for leaves in leaves_by_site(spec).values() for leaf in leaves]


def leaves_by_site(spec: model_pb2.ModelSpec) -> dict[str, list[Leaf]]:
    """The leaves of each site, in the order of its parts."""
    leaves: dict[str, list[Leaf]] = {}
    number = 0
    for site in spec.sites:
        parts = site_parts(site)
        embedding = site.kind == model_pb2.SITE_KIND_EMBEDDING
        leaves[site.name] = [
            Leaf(number + index, LeafShape(site.in_features, out, site.experts, embedding), site.shard, copies)
            for index, (out, copies) in enumerate(parts)
        ]
        number += len(parts)
    return leaves
