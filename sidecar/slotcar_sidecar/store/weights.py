"""An adapter's weights in host memory under the digest that identifies them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from slotcar_sidecar.core.adapter import Adapter, SiteLora
from slotcar_sidecar.core.ids import Digest

_DIGEST_VERSION = "slotcar.adapter.v1"


# What a site can have beside A and B that enters the digest, in this order.
EXTRAS = ("magnitude", "lora_bias", "bias", "base")

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class SiteVectors(NamedTuple):
    """What a site adds beside the low-rank part, each float32 [out] or None for zeros.

    delta = scale · (1 + gain) ⊙ (x Aᵀ) Bᵀ + gain ⊙ y_base + bias

    Derived from what the digest covers: the file and, where `extras` has "base", the base model.
    """

    gain: torch.Tensor | None
    bias: torch.Tensor | None


class SiteWeights(NamedTuple):
    """One site's part and its matrices as the file has them.

    linear:    A [rank, in], B [out, rank]
    embedding: A [rank, tokens], B [width, rank]
    experts:   A [E · rank, in], B [out, rank · E]: of expert e A.view(E, rank, in)[e], B.view(out, rank, E)[:, :, e]

    `extras` by their names in EXTRAS: "magnitude", "lora_bias" and "bias", each [out], and "base", the fingerprint of
    the base model that `vectors` are derived from, a float32 for each byte.
    """

    part: SiteLora
    a: torch.Tensor
    b: torch.Tensor
    extras: Mapping[str, torch.Tensor] = _NOTHING
    vectors: SiteVectors | None = None


class Origin(NamedTuple):
    """What is known of an adapter beside its weights; none of it enters the digest."""

    source: str
    file_dtype: str
    fields_ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostWeights:
    """Verified weights by site, each as SiteWeights says; `extras` and `vectors` have the sites that have some.

    Invariant: the tensors are contiguous, in private memory, in the file's dtype, and unscaled: the scale stays in
    SiteLora.scale. Nothing writes to them, so that each fill of a slot starts from the same bytes.
    """

    adapter: Adapter
    a: Mapping[str, torch.Tensor]
    b: Mapping[str, torch.Tensor]
    extras: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    vectors: Mapping[str, SiteVectors] = field(default_factory=dict)

    @classmethod
    def of(cls, sites: Iterable[SiteWeights], origin: Origin) -> HostWeights:
        """Weights from sites in any order, digest computed here."""
        ordered = sorted(sites, key=lambda site: site.part.site)
        adapter = Adapter(
            digest=digest_of(ordered),
            parts=tuple(site.part for site in ordered),
            bytes=sum(tensor.nbytes for tensor in (*_digested(ordered), *_derived(ordered))),
            **origin._asdict(),
        )
        return cls(
            adapter,
            a=MappingProxyType({site.part.site: site.a for site in ordered}),
            b=MappingProxyType({site.part.site: site.b for site in ordered}),
            extras=MappingProxyType({site.part.site: site.extras for site in ordered if site.extras}),
            vectors=MappingProxyType({site.part.site: site.vectors for site in ordered if site.vectors is not None}),
        )

    def sites(self) -> Iterator[SiteWeights]:
        """The weights of each site, in the order of the parts."""
        for part in self.adapter.parts:
            name = part.site
            yield SiteWeights(part, self.a[name], self.b[name], self.extras.get(name, _NOTHING), self.vectors.get(name))


def digest_of(ordered: Iterable[SiteWeights]) -> Digest:
    """sha256 over a version tag, the canonical spec of sites in order, then A's, B's and the extras' bytes by site.

    Names, paths, key prefixes, file order and configuration that does not change the result have no part in it.
    """
    sites = list(ordered)
    canonical = json.dumps(list(map(_spec, sites)), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    sha = hashlib.sha256(f"{_DIGEST_VERSION}\n{canonical}\n".encode())
    for tensor in _digested(sites):
        sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return Digest(f"sha256:{sha.hexdigest()}")


def _spec(site: SiteWeights) -> dict[str, object]:
    part = site.part
    spec: dict[str, object] = {
        "site": part.site,
        "rank": part.rank,
        # -0.0 and 0.0 scale alike.
        "scale": (part.scale + 0.0).hex(),
        "a": _shape(site.a),
        "b": _shape(site.b),
    }
    if part.kind != "linear":
        spec |= {"kind": part.kind, "experts": part.experts}
    if site.extras:
        spec["extras"] = {name: _shape(tensor) for name, tensor in site.extras.items()}
    return spec


def _shape(tensor: torch.Tensor) -> list[str | int]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _digested(sites: Iterable[SiteWeights]) -> Iterator[torch.Tensor]:
    for site in sites:
        yield site.a
        yield site.b
        yield from (site.extras[name] for name in EXTRAS if name in site.extras)


def _derived(sites: Iterable[SiteWeights]) -> Iterator[torch.Tensor]:
    for site in sites:
        yield from (vector for vector in site.vectors or () if vector is not None)
