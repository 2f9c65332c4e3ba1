"""Makes an adapter of the corpus: what PEFT saves after a training that changed all it may train, then edits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.peft import read_peft
from slotcar_sidecar.store.shards import INDEX_FILE, Shards, shard_names
from slotcar_sidecar.store.weights import HostWeights

from tests.adapters import CONFIG_FILE, WEIGHTS_FILE
from tests.corpus.models import model_of, outputs_of

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How to make an adapter: for which model, with which PEFT settings, and what is done to its files afterwards.

    `kind` is the PEFT configuration's class; `dtype` that of the saved weights; `resize` the vocabulary's new size.
    """

    model: str
    settings: Mapping[str, Any]
    kind: str = "LoraConfig"
    dtype: torch.dtype = torch.float32
    embeddings: bool | str = False
    resize: int | None = None
    edit: Callable[[Config, Tensors], None] | None = None
    shards: int = 1


def make(recipe: Recipe, folder: Path) -> Path:
    """Writes the adapter's files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = model_of(recipe.model)
        if recipe.resize is not None:
            model.resize_token_embeddings(recipe.resize)
        adapted = get_peft_model(model, getattr(peft, recipe.kind)(**_settings(recipe)))
        _train(adapted, recipe.dtype)
        adapted.save_pretrained(str(folder), save_embedding_layers=recipe.embeddings)
    weights = folder / WEIGHTS_FILE
    if recipe.edit is not None:
        config, tensors = json.loads((folder / CONFIG_FILE).read_text()), load_file(weights)
        recipe.edit(config, tensors)
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        save_file(tensors, weights)
    if recipe.shards > 1:
        _split(weights, recipe.shards)
    return folder


def _settings(recipe: Recipe) -> dict[str, Any]:
    if recipe.kind != "LoraConfig":
        return dict(recipe.settings)
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | dict(recipe.settings)
    if recipe.model.startswith("old"):
        del settings["task_type"]
    return settings


def _train(adapted: Any, dtype: torch.dtype) -> None:
    """Changes each value that a training would change, by as much."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            if "magnitude" in name:
                parameter.mul_(1 + noise)
            elif "lora_" in name:
                parameter.copy_(noise)
            else:
                parameter.add_(noise)
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)


def _split(weights: Path, count: int) -> None:
    tensors = load_file(weights)
    keys = sorted(tensors)
    parts = [keys[start::count] for start in range(count)]
    names = [f"adapter_model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    for name, part in zip(names, parts, strict=True):
        save_file({key: tensors[key] for key in part}, weights.with_name(name))
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    weights.with_name(INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read(folder: Path, base: BaseModel | None) -> HostWeights:
    """What the sidecar reads from the folder."""
    weights: bytes | Shards = b""
    if (folder / INDEX_FILE).exists():
        index = (folder / INDEX_FILE).read_bytes()
        weights = Shards(index, {name: (folder / name).read_bytes() for name in shard_names(index)})
    else:
        weights = (folder / WEIGHTS_FILE).read_bytes()
    return read_peft((folder / CONFIG_FILE).read_bytes(), weights, source="", base=base)


def peft_outputs(folder: Path, model: Any) -> torch.Tensor:
    """PEFT's own, from the same files, which hold all tensors in one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outputs_of(PeftModel.from_pretrained(model, str(folder)).eval())
