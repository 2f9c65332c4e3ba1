"""Every way in which PEFT writes a LoRA gives the delta that PEFT itself computes from the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slotcar_sidecar.store.peft import read_peft
from slotcar_sidecar.store.weights import HostWeights
from transformers import PreTrainedModel

from tests.adapters import (
    CONFIG_FILE,
    MINIMAL_CONFIG,
    WEIGHTS_FILE,
    make_adapter,
    peft_deltas,
    raw_tensors,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen2,
    write_raw_adapter,
)

LAYER = "model.layers.{}.self_attn.q_proj"

VARIANTS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any]]] = {
    "alpha/r": (tiny_llama, {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 12}),
    "rslora": (tiny_llama, {"use_rslora": True, "r": 8, "lora_alpha": 16}),
    "all-linear": (tiny_llama, {}),
    "all-linear with biases": (tiny_qwen2, {}),
    "lm_head": (tiny_llama, {"target_modules": ["q_proj", "lm_head"]}),
    "rank pattern": (tiny_llama, {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6}}),
    "rank pattern, regular expression": (tiny_llama, {"rank_pattern": {r"layers\.[1-9]+\..*(q|k)_proj": 2}}),
    "rank pattern, anchored": (tiny_llama, {"rank_pattern": {r"^model.layers.0.self_attn.q_proj": 16}}),
    "alpha pattern": (tiny_llama, {"alpha_pattern": {r".*\.self_attn\.\w+": 3, "q_proj": 100, "down_proj": 5.5}}),
    "both patterns, rslora": (
        tiny_llama,
        {"rank_pattern": {"k_proj": 3}, "alpha_pattern": {"k_proj": 7}, "use_rslora": True},
    ),
    "pattern that matches a longer name's end only after a dot": (tiny_llama, {"rank_pattern": {"proj": 2}}),
    "partial layers": (tiny_llama, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "regular expression": (tiny_llama, {"target_modules": r".*layers\.0\..*(q|up)_proj"}),
    "excluded modules": (tiny_llama, {"exclude_modules": ["k_proj"]}),
    "Conv1D": (tiny_gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "Conv1D, flag left out": (tiny_gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": False}),
    "bfloat16": (tiny_llama, {"dtype": torch.bfloat16}),
    "float16": (tiny_llama, {"dtype": torch.float16}),
    "float alpha": (tiny_llama, {"lora_alpha": 2.5}),
    "alpha 0": (tiny_llama, {"lora_alpha": 0}),
    "rank 1": (tiny_llama, {"r": 1}),
    "rank above the hidden size": (tiny_llama, {"r": 96, "target_modules": ["q_proj"]}),
    "orthogonal": (tiny_llama, {"init_lora_weights": "orthogonal"}),
    "mica": (tiny_llama, {"init_lora_weights": "mica", "target_modules": ["q_proj"]}),
    "gaussian, dropout": (tiny_llama, {"init_lora_weights": "gaussian", "lora_dropout": 0.1}),
}


def read(folder: Path) -> HostWeights:
    return read_peft((folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes(), source=str(folder))


def assert_equal_to_peft(weights: HostWeights, deltas: dict[str, Any]) -> None:
    assert weights.adapter.sites == tuple(sorted(deltas))
    for part in weights.adapter.parts:
        x, wanted = deltas[part.site]
        a, b = weights.a[part.site], weights.b[part.site]
        assert (part.rank, part.in_features) == tuple(a.shape)
        assert (part.out_features, part.rank) == tuple(b.shape)
        torch.testing.assert_close(part.scale * (x @ a.float().T) @ b.float().T, wanted, rtol=1e-5, atol=1e-5)


# PEFT's own, for a pattern that names no module and for GPT-2's flag.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_what_peft_computes(variant: str, tmp_path: Path) -> None:
    build, settings = VARIANTS[variant]
    model = build()
    folder = make_adapter(tmp_path, model, **settings)
    deltas = peft_deltas(folder, model)
    assert deltas
    assert_equal_to_peft(read(folder), deltas)


def test_mixed_ranks_stay_as_they_are(tmp_path: Path) -> None:
    weights = read(make_adapter(tmp_path, tiny_llama(), rank_pattern={"q_proj": 2, "up_proj": 9}))
    assert {part.rank for part in weights.adapter.parts} == {2, 4, 9}
    assert weights.adapter.rank == 9


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """An adapter as PEFT saves it, and PEFT's deltas."""
    model = tiny_llama()
    folder = make_adapter(tmp_path / "saved", model, r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    return folder, peft_deltas(folder, model)


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.removeprefix("base_model.model.").replace(".weight", ".my-adapter_2.weight"),
    ],
    ids=["no prefix", "default infix", "named infix, no prefix"],
)
def test_keys_of_the_wild(saved: tuple[Path, dict[str, Any]], rename: Callable[[str], str], tmp_path: Path) -> None:
    folder, deltas = saved
    tensors = {rename(key): tensor for key, tensor in load_file(folder / WEIGHTS_FILE).items()}
    other = write_raw_adapter(tmp_path / "renamed", (folder / CONFIG_FILE).read_bytes(), tensors)
    assert_equal_to_peft(read(other), deltas)


def test_a_minimal_configuration_of_old_times(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, deltas = saved
    other = write_raw_adapter(tmp_path / "old", MINIMAL_CONFIG, (folder / WEIGHTS_FILE).read_bytes())
    assert_equal_to_peft(read(other), deltas)


def test_the_twelve_fields_of_peft_0_2(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, deltas = saved
    config = dict(MINIMAL_CONFIG) | {
        "base_model_name_or_path": "org/model",
        "bias": "none",
        "enable_lora": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.05,
        "merge_weights": False,
        "modules_to_save": None,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    }
    weights = read(write_raw_adapter(tmp_path / "old", config, (folder / WEIGHTS_FILE).read_bytes()))
    assert_equal_to_peft(weights, deltas)
    assert weights.adapter.fields_ignored == (
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "target_modules",
        "task_type",
    )
    assert weights.adapter.warnings == ()


def test_tensors_keep_the_files_dtypes_and_are_private(tmp_path: Path) -> None:
    site = LAYER.format(0)
    tensors = raw_tensors(site)
    tensors[f"base_model.model.{site}.lora_A.weight"] = tensors[f"base_model.model.{site}.lora_A.weight"].bfloat16()
    folder = write_raw_adapter(tmp_path, MINIMAL_CONFIG, tensors)
    weights = read(folder)
    assert (weights.a[site].dtype, weights.b[site].dtype) == (torch.bfloat16, torch.float32)
    assert weights.adapter.file_dtype == "BF16, F32"
    assert weights.adapter.bytes == 4 * 64 * 2 + 64 * 4 * 4
    assert weights.adapter.source == str(folder)
    assert weights.a[site].is_contiguous()
    before = weights.b[site].clone()
    with (folder / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(0)
    assert torch.equal(weights.b[site], before)


def test_the_scale_is_not_in_the_weights(tmp_path: Path) -> None:
    site = LAYER.format(0)
    tensors = raw_tensors(site)
    weights = read(write_raw_adapter(tmp_path, dict(MINIMAL_CONFIG) | {"lora_alpha": 400}, tensors))
    assert weights.adapter.parts[0].scale == 100
    assert torch.equal(weights.b[site], tensors[f"base_model.model.{site}.lora_B.weight"])


WARNED = [
    ({"rank_pattern": {"proj": 2, "v_proj": 2}}, {}, "rank_pattern gives no module its value by proj, v_proj"),
    ({"alpha_pattern": {"q_proj": 9, "attn.q_proj": 9}}, {}, "alpha_pattern gives no module its value by attn.q_proj"),
    ({"lora_alpha": 0}, {}, "lora_alpha is 0, so the adapter has no effect, at model.layers.0.self_attn.q_proj"),
    ({}, {"b": 0.0}, "every lora_B is zero, so the adapter has no effect: it was never trained"),
    (
        {"target_modules": ["v_proj"]},
        {},
        "target_modules does not name, but the file has weights for, and so adapts, model.layers.0.self_attn.q_proj",
    ),
]


@pytest.mark.parametrize(("config", "weights", "warning"), WARNED)
def test_what_a_person_should_look_at(
    config: dict[str, Any], weights: dict[str, float], warning: str, tmp_path: Path
) -> None:
    tensors = raw_tensors(LAYER.format(0))
    if "b" in weights:
        tensors[f"base_model.model.{LAYER.format(0)}.lora_B.weight"].fill_(weights["b"])
    folder = write_raw_adapter(tmp_path, dict(MINIMAL_CONFIG) | config, tensors)
    assert read(folder).adapter.warnings == (warning,)


def test_ten_thousand_keys(tmp_path: Path) -> None:
    sites = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(5000)]
    weights = read(write_raw_adapter(tmp_path, MINIMAL_CONFIG, raw_tensors(*sites, features=(2, 2))))
    assert len(weights.adapter.parts) == 5000


def test_every_field_that_peft_saves_is_known(saved: tuple[Path, dict[str, Any]]) -> None:
    from slotcar_sidecar.store import fields

    known = fields.EFFECTIVE | fields.WITHOUT_EFFECT.keys() | fields.REFUSED.keys() | {fields.INIT_FIELD}
    assert json.loads((saved[0] / CONFIG_FILE).read_text()).keys() <= known
