"""A model with a site of every kind for two ranks, adapters for it, and what they must give, from their files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from slotcar.v1 import model_pb2

from tests.adapters import WEIGHTS_FILE, write_raw_adapter

RANKS = 2
HIDDEN, INNER, TOKENS, EXPERTS, RANK = 32, 24, 50, 3, 4
SCALE = 2.0  # alpha 8, r 4
QKV = {"attn.q": 32, "attn.k": 16, "attn.v": 16}
PREFIX = "base_model.model."


def model() -> model_pb2.ModelSpec:
    linear, column, row = model_pb2.SITE_KIND_LINEAR, model_pb2.SHARD_COLUMN, model_pb2.SHARD_ROW
    experts = model_pb2.SITE_KIND_EXPERTS
    # Both ranks have all of v, as when there are fewer heads than ranks.
    copies = {"attn.q": 1, "attn.k": 1, "attn.v": 2}
    parts = [model_pb2.SitePart(name=name, out_features=width, copies=copies[name]) for name, width in QKV.items()]
    gates = [model_pb2.SitePart(name=f"old.experts.*.{name}", out_features=INNER, copies=1) for name in ("w1", "w3")]
    sites = [
        model_pb2.Site(name="attn.o", in_features=HIDDEN, out_features=HIDDEN, kind=linear, shard=row),
        model_pb2.Site(name="attn.qkv", in_features=HIDDEN, out_features=64, kind=linear, parts=parts, shard=column),
        model_pb2.Site(name="embed", in_features=TOKENS, out_features=HIDDEN, kind=model_pb2.SITE_KIND_EMBEDDING),
        model_pb2.Site(
            name="moe.experts.down_proj", in_features=INNER, out_features=HIDDEN, kind=experts, experts=EXPERTS
        ),
        model_pb2.Site(
            name="moe.experts.gate_up_proj",
            in_features=HIDDEN,
            out_features=2 * INNER,
            kind=experts,
            experts=EXPERTS,
            parts=gates,
        ),
        model_pb2.Site(name="plain", in_features=HIDDEN, out_features=INNER, kind=linear),
    ]
    return model_pb2.ModelSpec(sites=sites, tensor_parallel=RANKS, dtype=1)


def write_adapters(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each adapter, by their keys without the prefix."""
    linear = {"attn.q": (HIDDEN, 32), "attn.v": (HIDDEN, 16), "attn.o": (HIDDEN, HIDDEN), "plain": (HIDDEN, INNER)}
    fused, per_expert = _fused(), {f"old.experts.{e}.w3": (HIDDEN, INNER) for e in (0, 2)}
    contents = {
        "packed": _linear(linear, seed=1),
        "biased": _linear({"attn.k": (HIDDEN, 16), "attn.o": (HIDDEN, HIDDEN)}, seed=2, bias=True),
        "whole": _linear({"attn.qkv": (HIDDEN, 64)}, seed=3),
        "tokens": {
            "embed.lora_embedding_A": _random(4, RANK, TOKENS),
            "embed.lora_embedding_B": _random(5, HIDDEN, RANK),
        },
        "experts": fused,
        "old": _linear(per_expert, seed=6),
    }
    for name, tensors in contents.items():
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "lora_bias": name == "biased"}
        if name == "experts":
            config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
        write_raw_adapter(root / name, config, {PREFIX + key: tensor for key, tensor in tensors.items()})
    return contents


def read(root: Path, name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(PREFIX): tensor for key, tensor in load_file(root / name / WEIGHTS_FILE).items()}


def linear_delta(tensors: dict[str, torch.Tensor], site: str, x: torch.Tensor, width: int) -> torch.Tensor:
    """In float64; zeros where the adapter has nothing."""
    result = torch.zeros(len(x), width, dtype=torch.float64)
    if f"{site}.lora_A.weight" in tensors:
        a, b = (tensors[f"{site}.lora_{side}.weight"].double() for side in "AB")
        result += SCALE * (x.double() @ a.T) @ b.T
    if f"{site}.lora_B.bias" in tensors:
        result += SCALE * tensors[f"{site}.lora_B.bias"].double()
    return result


def packed_delta(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Of q, k and v; an adapter whose module is the packed one has them side by side."""
    if "attn.qkv.lora_A.weight" in tensors:
        return list(linear_delta(tensors, "attn.qkv", x, 64).split(list(QKV.values()), dim=1))
    return [linear_delta(tensors, name, x, width) for name, width in QKV.items()]


def of_rank(parts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """What one of the two ranks has of q, k and v."""
    q, k, v = parts
    return torch.cat([q[:, 16 * rank : 16 * rank + 16], k[:, 8 * rank : 8 * rank + 8], v], dim=1)


def token_delta(tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    a, b = tensors["embed.lora_embedding_A"].double(), tensors["embed.lora_embedding_B"].double()
    return SCALE * a.T[ids.long()] @ b.T


def expert_delta(tensors: dict[str, torch.Tensor], x: torch.Tensor, experts: torch.Tensor, down: bool) -> torch.Tensor:
    """Of gate_up, or of down, as PEFT views the tensors of a parameter that has all experts."""
    key = "moe.experts.lora_" if down else "moe.experts.base_layer.lora_"
    a, b = tensors[f"{key}A.weight"].double(), tensors[f"{key}B.weight"].double()
    a, b = a.view(EXPERTS, RANK, -1), b.view(len(b), RANK, EXPERTS)
    rows = [SCALE * b[..., e] @ (a[e] @ row.double()) for e, row in zip(experts.tolist(), x, strict=True)]
    return torch.stack(rows)


def _fused() -> dict[str, torch.Tensor]:
    rows = EXPERTS * RANK
    return {
        "moe.experts.base_layer.lora_A.weight": _random(7, rows, HIDDEN),
        "moe.experts.base_layer.lora_B.weight": _random(8, 2 * INNER, rows),
        "moe.experts.lora_A.weight": _random(9, rows, INNER),
        "moe.experts.lora_B.weight": _random(10, HIDDEN, rows),
    }


def _linear(sites: dict[str, tuple[int, int]], seed: int, bias: bool = False) -> dict[str, torch.Tensor]:
    tensors = {}
    for index, (site, (in_features, out_features)) in enumerate(sites.items()):
        tensors[f"{site}.lora_A.weight"] = _random(100 * seed + index, RANK, in_features)
        tensors[f"{site}.lora_B.weight"] = _random(200 * seed + index, out_features, RANK)
        if bias:
            tensors[f"{site}.lora_B.bias"] = _random(300 * seed + index, out_features)
    return tensors


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3
