"""Tiny random base models of the corpus, one for each way in which adapters name and shape their modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from tests.adapters import tiny_gpt2, tiny_llama, tiny_qwen2

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_mixtral() -> Any:
    """Four experts whose weights are fused: `mlp.experts.gate_up_proj` and `down_proj`."""
    return _seeded(lambda: MixtralForCausalLM(MixtralConfig(**_SHAPE, intermediate_size=96, num_local_experts=4)))


def tiny_qwen2_moe() -> Any:
    """Four fused experts beside a shared one of linear modules."""
    config = Qwen2MoeConfig(
        **_SHAPE,
        intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    )
    return _seeded(lambda: Qwen2MoeForCausalLM(config))


def tiny_phi3() -> Any:
    """Linear modules `qkv_proj` and `gate_up_proj` that other models have in parts."""
    return _seeded(lambda: Phi3ForCausalLM(Phi3Config(**_SHAPE, intermediate_size=96)))


class _Expert(nn.Module):
    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self._names = names
        gate, down, up = names
        for name, features in ((gate, (64, 96)), (down, (96, 64)), (up, (64, 96))):
            setattr(self, name, nn.Linear(*features, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, down, up = (getattr(self, name) for name in self._names)
        result: torch.Tensor = down(nn.functional.silu(gate(x)) * up(x))
        return result


class _Moe(nn.Module):
    """Every expert sees every row, weighed by the router."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(_Expert(names) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return torch.stack([expert(x) for expert in self.experts], -1) @ weights[..., None]


class _Layer(nn.Module):
    def __init__(self, block: str, names: tuple[str, str, str]) -> None:
        super().__init__()
        self._block = block
        setattr(self, block, _Moe(names))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + getattr(self, self._block)(x)[..., 0]
        return result


class _Inner(nn.Module):
    def __init__(self, block: str, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(_Layer(block, names) for _ in range(2))


class PerExpert(nn.Module):
    """The modules as transformers 4 named them: one linear module for each matrix of each expert."""

    def __init__(self, block: str, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.model = _Inner(block, names)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return x


def tiny_old_mixtral() -> Any:
    return _seeded(lambda: PerExpert("block_sparse_moe", ("w1", "w2", "w3")))


def tiny_old_qwen2_moe() -> Any:
    return _seeded(lambda: PerExpert("mlp", ("gate_proj", "down_proj", "up_proj")))


MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "gpt2": tiny_gpt2,
    "phi3": tiny_phi3,
    "mixtral": tiny_mixtral,
    "qwen2-moe": tiny_qwen2_moe,
    "old mixtral": tiny_old_mixtral,
    "old qwen2-moe": tiny_old_qwen2_moe,
}


def model_of(name: str) -> Any:
    """A model of one's own."""
    return copy.deepcopy(_model(name))


@cache
def _model(name: str) -> Any:
    return MODELS[name]()


def outputs_of(model: Any, seed: int = 3) -> torch.Tensor:
    """Logits, or whatever a model gives, for two rows of random token ids."""
    ids = torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        found = model(ids)
    result: torch.Tensor = getattr(found, "logits", found)
    return result


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()
