"""Gains and biases that are derived beside a base model: what they depend on, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported, SlotcarError
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.peft import read_peft
from slotcar_sidecar.store.weights import HostWeights

from tests.adapters import MINIMAL_CONFIG, raw_tensors, tiny_llama, tiny_qwen2

SITE = "model.layers.0.self_attn.q_proj"
MAGNITUDE = f"{SITE}.lora_magnitude_vector"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, build in (("llama", tiny_llama), ("qwen2", tiny_qwen2)):
        folders[name] = tmp_path_factory.mktemp(name)
        build().save_pretrained(folders[name])
    return folders


def read(tensors: dict[str, torch.Tensor], base: BaseModel | None, **fields: Any) -> HostWeights:
    return read_peft(json.dumps(dict(MINIMAL_CONFIG) | fields).encode(), save(tensors), source="test", base=base)


def refusal(tensors: dict[str, torch.Tensor], base: BaseModel | None, **fields: Any) -> SlotcarError:
    with pytest.raises((AdapterInvalid, AdapterUnsupported)) as caught:
        read(tensors, base, **fields)
    return caught.value


def dora(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return raw_tensors(SITE) | {MAGNITUDE: torch.ones(64)} | more


def test_the_digest_covers_the_base_model_where_the_values_depend_on_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders["llama"] / "model.safetensors")
    tensors["model.norm.weight"] += 1
    (tmp_path / "config.json").write_bytes((folders["llama"] / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    bases = BaseModel(folders["llama"]), BaseModel(tmp_path)
    assert len({read(dora(), base, use_dora=True).adapter.digest for base in bases}) == 2
    assert len({read(raw_tensors(SITE), base).adapter.digest for base in (*bases, None)}) == 1


def test_the_digest_covers_every_vector(folders: dict[str, Path]) -> None:
    base, key = BaseModel(folders["qwen2"]), f"{SITE}.base_layer.bias"
    found = {
        read(dora(), base, use_dora=True).adapter.digest,
        read(dora(**{MAGNITUDE: torch.full((64,), 2.0)}), base, use_dora=True).adapter.digest,
        read(dora(**{key: torch.zeros(64)}), base, use_dora=True).adapter.digest,
        read(raw_tensors(SITE) | {key: torch.zeros(64)}, base).adapter.digest,
        read(raw_tensors(SITE) | {f"{SITE}.lora_B.bias": torch.zeros(64)}, None, lora_bias=True).adapter.digest,
        read(raw_tensors(SITE), base).adapter.digest,
    }
    assert len(found) == 6


def test_the_parts_say_what_there_is(folders: dict[str, Path]) -> None:
    weights = read(dora(), BaseModel(folders["llama"]), use_dora=True)
    (part,) = weights.adapter.parts
    assert (part.has_gain, part.has_bias) == (True, False)
    assert weights.vectors[SITE].gain is not None
    assert weights.vectors[SITE].gain.dtype == torch.float32
    assert weights.vectors[SITE].bias is None
    assert weights.adapter.bytes == sum(
        tensor.nbytes
        for tensor in (weights.a[SITE], weights.b[SITE], *weights.extras[SITE].values(), weights.vectors[SITE].gain)
    )
    plain = read(raw_tensors(SITE), None)
    assert (plain.extras, plain.vectors) == ({}, {})


def test_a_bias_that_was_not_trained_adds_nothing(folders: dict[str, Path]) -> None:
    bias = tiny_qwen2().get_parameter(f"{SITE}.bias").detach().clone()
    weights = read(raw_tensors(SITE) | {f"{SITE}.base_layer.bias": bias}, BaseModel(folders["qwen2"]), bias="lora_only")
    found = weights.vectors[SITE].bias
    assert found is not None
    assert not found.any()


def test_a_row_of_zeros_has_no_direction(folders: dict[str, Path]) -> None:
    weight = tiny_llama().get_parameter(f"{SITE}.weight").detach()
    tensors = {f"{SITE}.lora_A.weight": torch.eye(64), f"{SITE}.lora_B.weight": -weight.clone()}
    error = refusal(
        tensors | {MAGNITUDE: torch.ones(64)}, BaseModel(folders["llama"]), use_dora=True, r=64, lora_alpha=64
    )
    assert "not finite" in error.message
    assert error.facts["tensor"] == MAGNITUDE


def test_another_base_model(folders: dict[str, Path]) -> None:
    wide = raw_tensors(SITE, features=(128, 64)) | {MAGNITUDE: torch.ones(64)}
    error = refusal(wide, BaseModel(folders["llama"]), use_dora=True)
    assert (error.facts["found"], error.facts["wanted"]) == ("[64, 64]", "[64, 128]")
    assert "another base model" in error.message
    no_bias = raw_tensors(SITE) | {f"{SITE}.base_layer.bias": torch.ones(64)}
    assert "which has none" in refusal(no_bias, BaseModel(folders["llama"])).message


@pytest.mark.parametrize("key", ["lm_head.weight", "base_model.model.lm_head.base_layer.weight"])
def test_a_copy_of_the_bases_own(key: str, folders: dict[str, Path]) -> None:
    base, copy = BaseModel(folders["llama"]), tiny_llama().get_parameter("lm_head.weight").detach().clone()
    weights = read(raw_tensors(SITE) | {key: copy}, base)
    assert weights.adapter.digest == read(raw_tensors(SITE), None).adapter.digest
    copy[-1, -1] += 1e-6
    error = refusal(raw_tensors(SITE) | {key: copy}, base)
    assert isinstance(error, AdapterUnsupported)
    assert "trained too" in error.message


def test_memory_of_copies_does_not_stay(folders: dict[str, Path]) -> None:
    copy = tiny_llama().get_parameter("lm_head.weight").detach().clone()
    weights = read(raw_tensors(SITE) | {"lm_head.weight": copy}, BaseModel(folders["llama"]))
    assert weights.a[SITE].untyped_storage().nbytes() == weights.a[SITE].nbytes
