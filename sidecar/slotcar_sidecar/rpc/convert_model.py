"""Between ModelSpec messages and values; fields that are malformed raise with their names."""

from __future__ import annotations

from slotcar.v1 import model_pb2, tensor_pb2

from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.model import MAX_RENAMES, ModelSpec, Site, SitePart
from slotcar_sidecar.rpc.convert import DTYPES, known

__all__ = ["from_model", "to_model"]

_DTYPES: dict[int, str | None] = {
    tensor_pb2.DTYPE_UNSPECIFIED: None,
    **{number: name for name, number in DTYPES.items()},
}
_KINDS: dict[str, model_pb2.SiteKind.ValueType] = {
    "linear": model_pb2.SITE_KIND_LINEAR,
    "embedding": model_pb2.SITE_KIND_EMBEDDING,
    "experts": model_pb2.SITE_KIND_EXPERTS,
}
_SHARDS: dict[str, model_pb2.Shard.ValueType] = {
    "none": model_pb2.SHARD_UNSPECIFIED,
    "column": model_pb2.SHARD_COLUMN,
    "row": model_pb2.SHARD_ROW,
}
_KIND_NAMES: dict[int, str] = {
    model_pb2.SITE_KIND_UNSPECIFIED: "linear",
    **{number: name for name, number in _KINDS.items()},
}
_SHARD_NAMES: dict[int, str] = {model_pb2.SHARD_NONE: "none", **{number: name for name, number in _SHARDS.items()}}

_MAX_SITES = 1 << 14
_MAX_PARTS = 1 << 16  # of all sites: each becomes an object


def from_model(model: ModelSpec) -> model_pb2.ModelSpec:
    return model_pb2.ModelSpec(
        sites=map(_from_site, model.sites),
        dtype=DTYPES[model.dtype] if model.dtype else tensor_pb2.DTYPE_UNSPECIFIED,
        tensor_parallel=model.tensor_parallel,
        fingerprint=model.fingerprint or "",
        renames=[model_pb2.Rename(adapter_prefix=mine, model_prefix=theirs) for mine, theirs in model.renames],
    )


def _from_site(site: Site) -> model_pb2.Site:
    return model_pb2.Site(
        name=site.name,
        in_features=site.in_features,
        out_features=site.out_features,
        kind=_KINDS[site.kind],
        parts=[
            model_pb2.SitePart(name=part.name, out_features=part.out_features, copies=part.copies)
            for part in site.parts
        ],
        experts=site.experts,
        shard=_SHARDS[site.shard],
    )


def to_model(spec: model_pb2.ModelSpec) -> ModelSpec:
    """Raises RequestInvalid."""
    _check_counts(spec)
    return ModelSpec.of(
        [_to_site(f"model_spec.sites[{index}]", site) for index, site in enumerate(spec.sites)],
        dtype=known("model_spec.dtype", spec.dtype, _DTYPES),
        tensor_parallel=spec.tensor_parallel or 1,
        fingerprint=spec.fingerprint or None,
        renames=tuple((rename.adapter_prefix, rename.model_prefix) for rename in spec.renames),
    )


def _check_counts(spec: model_pb2.ModelSpec) -> None:
    """Before anything is made of them: millions of empty ones fit into one message."""
    for field, count, most in (
        ("sites", len(spec.sites), _MAX_SITES),
        ("renames", len(spec.renames), MAX_RENAMES),
        ("sites.parts", sum(len(site.parts) for site in spec.sites), _MAX_PARTS),
    ):
        if count > most:
            wanted = f"at most {most}"
            raise RequestInvalid(f"model_spec.{field}", found=f"{count} {field.rpartition('.')[2]}", wanted=wanted)


def _to_site(field: str, site: model_pb2.Site) -> Site:
    parts = tuple(
        SitePart.checked(f"{field}.parts[{index}]", (part.name, part.out_features, part.copies or 1))
        for index, part in enumerate(site.parts)
    )
    kind = known(f"{field}.kind", site.kind, _KIND_NAMES)
    shard = known(f"{field}.shard", site.shard, _SHARD_NAMES)
    return Site.checked(field, (site.name, site.in_features, site.out_features, kind, parts, site.experts, shard))
