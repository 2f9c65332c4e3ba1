"""An adapter's weights in host memory under the digest that identifies them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from slotcar_sidecar.core.adapter import Adapter, SiteLora
from slotcar_sidecar.core.ids import Digest

_DIGEST_VERSION = "slotcar.adapter.v1"


class SiteWeights(NamedTuple):
    """One site's part and its matrices A [rank, in] and B [out, rank]."""

    part: SiteLora
    a: torch.Tensor
    b: torch.Tensor


class Origin(NamedTuple):
    """What is known of an adapter beside its weights; none of it enters the digest."""

    source: str
    file_dtype: str
    fields_ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostWeights:
    """Verified weights by site: `a` [rank, in] and `b` [out, rank].

    Invariant: the tensors are contiguous, in private memory, in the file's dtype, and unscaled: the scale stays in
    SiteLora.scale. Nothing writes to them, so that each fill of a slot starts from the same bytes.
    """

    adapter: Adapter
    a: Mapping[str, torch.Tensor]
    b: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, sites: Iterable[SiteWeights], origin: Origin) -> HostWeights:
        """Weights from sites in any order, digest computed here."""
        ordered = sorted(sites, key=lambda site: site.part.site)
        adapter = Adapter(
            digest=digest_of(ordered),
            parts=tuple(site.part for site in ordered),
            bytes=sum(matrix.nbytes for matrix in _matrices(ordered)),
            **origin._asdict(),
        )
        return cls(
            adapter,
            MappingProxyType({site.part.site: site.a for site in ordered}),
            MappingProxyType({site.part.site: site.b for site in ordered}),
        )


def digest_of(ordered: Iterable[SiteWeights]) -> Digest:
    """sha256 over a version tag, the canonical spec of sites in order, then A's and B's bytes site by site.

    Names, paths, key prefixes, file order and configuration that does not change the result have no part in it.
    """
    sites = list(ordered)
    spec = [
        {
            "site": part.site,
            "rank": part.rank,
            # -0.0 and 0.0 scale alike.
            "scale": (part.scale + 0.0).hex(),
            "a": [str(a.dtype).removeprefix("torch."), *a.shape],
            "b": [str(b.dtype).removeprefix("torch."), *b.shape],
        }
        for part, a, b in sites
    ]
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    sha = hashlib.sha256(f"{_DIGEST_VERSION}\n{canonical}\n".encode())
    for matrix in _matrices(sites):
        sha.update(matrix.view(-1).view(torch.uint8).numpy().data)
    return Digest(f"sha256:{sha.hexdigest()}")


def _matrices(sites: Iterable[SiteWeights]) -> Iterator[torch.Tensor]:
    for _, a, b in sites:
        yield a
        yield b
