"""Forwards on the direct plane without a session, and what is true of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from slotcar_client.effects import Forward, ForwardCall
from slotcar_client.rpc import Rpc
from slotcar_client.transports.direct import DirectTransport
from slotcar_client.values import Mapping
from slotcar_kernels.reference import lora_delta

from tests.fakes.weights import FakeWeights
from tests.unit.client.direct.slots_writer import MODEL, FakeRpc, SlotsWriter

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def made(writer: SlotsWriter) -> DirectTransport:
    return DirectTransport(writer.connect, cast(Rpc, FakeRpc()))


def connected(writer: SlotsWriter) -> DirectTransport:
    transport = made(writer)
    transport.use(writer.opened)
    return transport


def rows(count: int, site: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, MODEL.by_name[site].in_features, generator=generator).to(dtype)


def forward(
    writer: SlotsWriter,
    mapping: Mapping,
    counts: tuple[int, ...],
    inputs: dict[str, torch.Tensor],
    base: dict[str, torch.Tensor] | None = None,
) -> Forward:
    return Forward(ForwardCall(inputs, counts, base), mapping, writer.opened)


def truth(owners: Sequence[FakeWeights | None], site: str, x: torch.Tensor) -> torch.Tensor:
    """The delta of each row in float64."""
    out = torch.zeros(len(x), MODEL.by_name[site].out_features, dtype=torch.float64)
    for row, weights in enumerate(owners):
        for part in weights.adapter.parts if weights is not None else ():
            if part.site == site and weights is not None:
                out[row] = lora_delta(x[row : row + 1], weights.a[site], weights.b[site], part.scale)[0]
    return out
