"""The model's sites as one rank of an engine has them, from the ModelSpec."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from slotcar.shm.slots import shard
from slotcar.v1 import model_pb2

from slotcar_client.convert import DTYPE_NAMES

__all__ = ["Model", "ModelSites", "RankSite", "Sites", "rank_sites"]


class RankSite(NamedTuple):
    """`number` is its place in the ModelSpec; the features are those of each rank, and no input at an embedding.

    `indices`: aux has integers below it, ids of tokens or numbers of experts; 0 at a linear site.
    """

    number: int
    site: model_pb2.Site
    in_features: int
    out_features: int
    indices: int

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def is_embedding(self) -> bool:
        return self.site.kind == model_pb2.SITE_KIND_EMBEDDING

    @property
    def indices_are(self) -> str:
        return "the id of each row's token" if self.is_embedding else "the expert of each row"


Sites: TypeAlias = dict[str, RankSite]


class Model(NamedTuple):
    """`dtype` is float32 where the ModelSpec says none."""

    sites: Sites
    dtype: str


class ModelSites:
    """What a session knows of its model, worked out once."""

    def __init__(self) -> None:
        self._known: tuple[model_pb2.ModelSpec, Model] | None = None

    def of(self, spec: model_pb2.ModelSpec | None) -> Model | None:
        if spec is None:
            return None
        if self._known is None or self._known[0] is not spec:
            self._known = spec, Model(rank_sites(spec), DTYPE_NAMES.get(spec.dtype, "float32"))
        return self._known[1]


def rank_sites(spec: model_pb2.ModelSpec) -> Sites:
    """By their names."""
    return {site.name: _rank_site(number, site, max(spec.tensor_parallel, 1)) for number, site in enumerate(spec.sites)}


def site_parts(site: model_pb2.Site) -> list[tuple[int, int]]:
    """The width of each part, of all ranks, and how many neighbouring ranks have the same shard of it."""
    return [(part.out_features, max(part.copies, 1)) for part in site.parts] or [(site.out_features, 1)]


def _rank_site(number: int, site: model_pb2.Site, ranks: int) -> RankSite:
    embedding = site.kind == model_pb2.SITE_KIND_EMBEDDING
    in_features, out_features = 0 if embedding else site.in_features, site.out_features
    if site.shard == model_pb2.SHARD_ROW:
        in_features //= ranks
    elif site.shard == model_pb2.SHARD_COLUMN:
        bounds = [shard(features, 0, ranks, copies) for features, copies in site_parts(site)]
        out_features = sum(end for _, end in bounds)
    return RankSite(number, site, in_features, out_features, site.in_features if embedding else site.experts)
