"""Makes adapters and tiny base models for any suite: real ones with PEFT, broken ones from raw dictionaries.

All is seeded, small (hidden size 64, two layers) and leaves the caller's models and random state as they were.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MINIMAL_CONFIG: Mapping[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """A random Llama whose head is its own."""
    return _seeded(LlamaForCausalLM, LlamaConfig(**_SHAPE, tie_word_embeddings=False), seed)


def tiny_qwen2(seed: int = 0) -> Qwen2ForCausalLM:
    """A random Qwen2, with biases on q, k and v, whose head is tied to its embedding."""
    return _seeded(Qwen2ForCausalLM, Qwen2Config(**_SHAPE, tie_word_embeddings=True), seed)


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """A random GPT-2: Conv1D layers, a tied head."""
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return _seeded(GPT2LMHeadModel, config, seed)


def make_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **lora_config: Any,
) -> Path:
    """Writes what PEFT saves for a LoRA on `model` with random A and B in `dtype`, and returns `folder`.

    `lora_config` goes to peft.LoraConfig; r, lora_alpha and target_modules have defaults.
    """
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | lora_config
    if not {"target_modules", "target_parameters"} & settings.keys():
        settings["target_modules"] = "all-linear"
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
                parameter.data = parameter.data.to(dtype)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def peft_deltas(folder: Path, model: PreTrainedModel, rows: int = 3, seed: int = 1) -> dict[str, Any]:
    """Per module that PEFT adapts from `folder`: a random x [rows, in] and PEFT's own delta [rows, out], in fp32."""
    adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, layer in adapted.base_model.model.named_modules():
        if "default" in getattr(layer, "lora_A", {}):
            a, b = layer.lora_A["default"], layer.lora_B["default"]
            x = torch.randn(rows, a.in_features, generator=generator)
            with torch.no_grad():
                result[name] = (x, b.float()(a.float()(x)) * layer.scaling["default"])
    return result


def write_raw_adapter(
    folder: Path, config: Mapping[str, Any] | bytes | None, tensors: Mapping[str, torch.Tensor] | bytes | None
) -> Path:
    """Writes the two files just as they are given: a mapping in its format, bytes verbatim, None not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        data = config if isinstance(config, bytes) else json.dumps(dict(config)).encode()
        (folder / CONFIG_FILE).write_bytes(data)
    if isinstance(tensors, bytes):
        (folder / WEIGHTS_FILE).write_bytes(tensors)
    elif tensors is not None:
        save_file(dict(tensors), folder / WEIGHTS_FILE)
    return folder


def raw_tensors(
    *sites: str, rank: int = 4, features: tuple[int, int] = (64, 64), seed: int = 0, prefix: str = "base_model.model."
) -> dict[str, torch.Tensor]:
    """A [rank, in] and B [out, rank] per site under PEFT's keys, `features` being (in, out)."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for site in sites:
        result[f"{prefix}{site}.lora_A.weight"] = torch.randn(rank, features[0], generator=generator)
        result[f"{prefix}{site}.lora_B.weight"] = torch.randn(features[1], rank, generator=generator)
    return result


def _seeded(model: type[Any], config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model(config).eval()
