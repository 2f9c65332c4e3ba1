"""What host weights mean, written down a second time: a base model that has them, by the formula in float64.

delta = scale · (x Aᵀ) Bᵀ + gain ⊙ y_base + bias
"""

from __future__ import annotations

from typing import Any

import torch
from slotcar_sidecar.store.weights import HostWeights, SiteWeights
from torch import nn
from transformers.pytorch_utils import Conv1D


def adapt(model: Any, weights: HostWeights) -> Any:
    """`model` with the adapter in it: hooks at linear modules and embeddings, sums in the weights of what has none."""
    for site in weights.sites():
        if site.part.kind == "experts":
            _add_to_experts(model, site)
            continue
        module = model.get_submodule(site.part.site)
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
            module.register_forward_hook(_hook(site))
        else:
            with torch.no_grad():
                module.weight += (site.part.scale * site.b.double() @ site.a.double()).to(module.weight.dtype)
    return model


def _hook(site: SiteWeights) -> Any:
    a, b, scale = site.a.double(), site.b.double(), site.part.scale

    def hook(module: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        (x,), base = inputs, output.double()
        low = a.T[x] if site.part.kind == "embedding" else x.double() @ a.T
        delta = scale * low @ b.T
        if site.vectors is not None and site.vectors.gain is not None:
            delta = delta + site.vectors.gain.double() * (base + delta)
        if site.vectors is not None and site.vectors.bias is not None:
            delta = delta + site.vectors.bias.double()
        return (base + delta).to(output.dtype)

    return hook


def _add_to_experts(model: Any, site: SiteWeights) -> None:
    part = site.part
    parameter = model.get_parameter(part.site)
    a = site.a.double().view(part.experts, part.rank, part.in_features)
    b = site.b.double().view(part.out_features, part.rank, part.experts)
    with torch.no_grad():
        for expert in range(part.experts):
            parameter[expert] += (part.scale * b[:, :, expert] @ a[expert]).to(parameter.dtype)
