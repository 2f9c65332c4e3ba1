"""What the real device computes for an adapter, at each of its sites, beside the formula in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.store.weights import HostWeights, SiteWeights

ROWS = 5


class Computed(NamedTuple):
    """Base plus delta at a site, by the device and by the formula."""

    site: str
    found: torch.Tensor
    truth: torch.Tensor


def computed(weights: HostWeights) -> Iterator[Computed]:
    """Fills a slot whose unused places are NaN, and runs one Forward for each site."""
    sites = list(weights.sites())
    spec = ModelSpec.of(
        [
            Site(part.site, part.in_features, part.out_features, part.kind, experts=part.experts)
            for part in (site.part for site in sites)
        ]
    )
    device = CpuDevice(2, max(part.rank for part in weights.adapter.parts), poison=True)
    device.shape(spec)
    device.fill(SlotId(1), weights)
    generator = torch.Generator().manual_seed(5)
    for site in sites:
        part = site.part
        most = {"linear": 1, "embedding": part.in_features, "experts": part.experts}[part.kind]
        aux = torch.randint(0, most, (ROWS, 1), generator=generator, dtype=torch.int32)
        x = torch.randn(ROWS, part.in_features, generator=generator)
        base = torch.randn(ROWS, part.out_features, generator=generator)
        item = ForwardItem(
            part.site,
            None if part.kind == "embedding" else _matrix(x, "float32"),
            base=_matrix(base, "float32"),
            aux=None if part.kind == "linear" else _matrix(aux, "int32"),
        )
        (out,) = device.execute(device.prepare([(SlotId(1), ROWS)], [item]))
        found = torch.frombuffer(out.data, dtype=torch.float32).view(ROWS, part.out_features).clone()
        yield Computed(part.site, found, base.double() + _delta(site, x.double(), aux[:, 0].long(), base.double()))
    device.close()


def _matrix(tensor: torch.Tensor, dtype: str) -> Matrix:
    rows, columns = tensor.shape
    return Matrix(dtype, rows, columns, columns, tensor.view(torch.uint8).flatten().numpy().data)


def _delta(site: SiteWeights, x: torch.Tensor, aux: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    part, a, b = site.part, site.a.double(), site.b.double()
    if part.kind == "experts":
        a = a.view(part.experts, part.rank, part.in_features)[aux]
        b = b.view(part.out_features, part.rank, part.experts).permute(2, 0, 1)[aux]
        delta = (b @ (a @ x[:, :, None]))[:, :, 0]
    else:
        delta = (a.T[aux] if part.kind == "embedding" else x @ a.T) @ b.T
    delta = part.scale * delta
    gain, bias = site.vectors or (None, None)
    if gain is not None:
        delta = delta + gain.double() * (base + delta)
    return delta if bias is None else delta + bias.double()
