"""Host weights without files: random A and B for chosen sites and ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from slotcar_sidecar.core.adapter import Adapter, SiteLora
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.model import ModelSpec


@dataclass(frozen=True)
class FakeWeights:
    """What a fill reads: per site A [rank, in] and B [out, rank], unscaled."""

    adapter: Adapter
    a: Mapping[str, torch.Tensor]
    b: Mapping[str, torch.Tensor]


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
