"""Host weights without files: random A and B for chosen sites and ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from slotcar_sidecar.core.adapter import Adapter, SiteLora
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.model import ModelSpec


class FakeVectors(NamedTuple):
    gain: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True)
class FakeWeights:
    """What a fill reads: per module A [rank, in] and B [out, rank], unscaled, and vectors where it has some."""

    adapter: Adapter
    a: Mapping[str, torch.Tensor]
    b: Mapping[str, torch.Tensor]
    vectors: Mapping[str, FakeVectors] = field(default_factory=dict)


def fake_weights(
    model: ModelSpec, ranks: Mapping[str, int], seed: int = 0, dtype: torch.dtype = torch.float32
) -> FakeWeights:
    """An adapter with `ranks` {site: rank}; each site has a scale of its own, and results are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    parts, a, b = [], {}, {}
    for index, (name, rank) in enumerate(sorted(ranks.items())):
        site = model.by_name[name]
        a[name] = (torch.randn(rank, site.in_features, generator=generator) * site.in_features**-0.5).to(dtype)
        b[name] = (torch.randn(site.out_features, rank, generator=generator) * rank**-0.5).to(dtype)
        parts.append(SiteLora(name, rank, 0.3 + index, site.in_features, site.out_features))
    size = sum(tensor.nbytes for tensor in (*a.values(), *b.values()))
    digest = Digest("sha256:" + hashlib.sha256(f"{seed} {dtype} {sorted(ranks.items())}".encode()).hexdigest())
    return FakeWeights(Adapter(digest, tuple(parts), size, str(dtype).removeprefix("torch."), "fake:"), a, b)


def weights_of_parts(parts: Sequence[SiteLora], seed: int = 0, dtype: torch.dtype = torch.float32) -> FakeWeights:
    """Random weights for parts of any kind, in the order of their names; results are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    ordered = tuple(sorted(parts, key=lambda part: part.site))
    a, b, vectors = {}, {}, {}
    for part in ordered:
        rank = part.rank * (part.experts or 1)
        inputs = 1 if part.kind == "embedding" else part.in_features
        a[part.site] = (torch.randn(rank, part.in_features, generator=generator) * inputs**-0.5).to(dtype)
        b[part.site] = (torch.randn(part.out_features, rank, generator=generator) * part.rank**-0.5).to(dtype)
        if part.has_gain or part.has_bias:
            gain, bias = torch.randn(2, part.out_features, generator=generator)
            vectors[part.site] = FakeVectors(gain if part.has_gain else None, bias if part.has_bias else None)
    size = sum(tensor.nbytes for tensor in (*a.values(), *b.values()))
    digest = Digest("sha256:" + hashlib.sha256(f"{seed} {dtype} {ordered}".encode()).hexdigest())
    return FakeWeights(Adapter(digest, ordered, size, str(dtype).removeprefix("torch."), "fake:"), a, b, vectors)
