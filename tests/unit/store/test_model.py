"""A folder's spec has exactly the linear modules that AutoModelForCausalLM has, with their shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.store.model import model_spec_from_file, model_spec_from_folder
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MixtralConfig, OPTConfig, PreTrainedModel, Qwen2MoeConfig
from transformers.pytorch_utils import Conv1D

from tests.adapters import tiny_gpt2, tiny_llama, tiny_qwen2

SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def auto(config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "gpt2": tiny_gpt2,
    "gpt_neox": lambda: auto(GPTNeoXConfig(**SMALL, intermediate_size=96)),
    "opt": lambda: auto(OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=32)),
    "mixtral": lambda: auto(MixtralConfig(**SMALL, intermediate_size=96, num_key_value_heads=2, num_local_experts=2)),
    "qwen2_moe": lambda: auto(
        Qwen2MoeConfig(
            **SMALL,
            intermediate_size=96,
            num_key_value_heads=2,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    ),
}


def linear_sites(model: PreTrainedModel) -> tuple[Site, ...]:
    """The sites by the modules themselves; a head that is tied is none."""
    sites = []
    for name, module in model.named_modules():
        if name == "lm_head" and model.config.tie_word_embeddings:
            continue
        if isinstance(module, torch.nn.Linear):
            sites.append(Site(name, module.in_features, module.out_features))
        elif isinstance(module, Conv1D):
            sites.append(Site(name, *module.weight.shape))
    return tuple(sorted(sites, key=lambda site: site.name))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_sites_are_the_models_linear_modules(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(str(tmp_path))
    spec = model_spec_from_folder(tmp_path)
    assert spec.sites == linear_sites(model)
    assert spec.dtype == "float32"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_a_base_model_that_was_saved_without_its_head(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.base_model.save_pretrained(str(tmp_path))
    assert model_spec_from_folder(tmp_path).sites == tuple(
        site for site in linear_sites(model) if site.name != "lm_head"
    )


def test_shards(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(str(tmp_path), max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert model_spec_from_folder(tmp_path).sites == linear_sites(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_the_configurations_or_the_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_llama().to(dtype).save_pretrained(str(tmp_path))
    name = str(dtype).removeprefix("torch.")
    assert model_spec_from_folder(tmp_path).dtype == name
    edit(tmp_path / "config.json", dtype=None)
    assert model_spec_from_folder(tmp_path).dtype == name
    edit(tmp_path / "config.json", torch_dtype="float32")
    assert model_spec_from_folder(tmp_path).dtype == "float32"
    edit(tmp_path / "config.json", torch_dtype="float64")
    assert model_spec_from_folder(tmp_path).dtype is None


def test_a_tied_head_is_no_site_even_if_it_was_saved(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(str(tmp_path))
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    assert "lm_head" not in model_spec_from_folder(tmp_path).by_name
    edit(tmp_path / "config.json", tie_word_embeddings=None)
    assert "lm_head" in model_spec_from_folder(tmp_path).by_name


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def quantized(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"})


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def broken_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)


def no_linear_layers(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")


def odd_entry(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b'\x0e\0\0\0\0\0\0\0{"a.weight":1}')


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "gone.safetensors"}}')


def shard_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "../x.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (no_config, "config.json"),
        (broken_config, "config.json"),
        (quantized, "quantized"),
        (no_weights, "neither model.safetensors"),
        (broken_weights, "header"),
        (no_linear_layers, "no linear layers"),
        (odd_entry, "model.safetensors"),
        (missing_shard, "gone.safetensors"),
        (shard_elsewhere, "weight_map"),
    ],
)
def test_a_folder_that_is_no_model_says_why(damage: Callable[[Path], None], named: str, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(str(tmp_path))
    damage(tmp_path)
    with pytest.raises(RequestInvalid) as caught:
        model_spec_from_folder(tmp_path)
    assert caught.value.field == "base_model"
    assert named in caught.value.facts["found"]
    assert str(tmp_path) in caught.value.facts["found"]


def test_a_spec_file_is_what_to_dict_gives(tmp_path: Path) -> None:
    spec = ModelSpec.of([Site("b", 2, 3), Site("a", 1, 4)], dtype="bfloat16")
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    assert model_spec_from_file(tmp_path / "spec.json") == spec


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "model_spec is '{file}: No such file"),
        ("{", "model_spec is '{file}: "),
        ('{"sites": 1}', "{file}: model_spec.sites is "),
        ('{"sites": [], "colour": 1}', "{file}: model_spec.colour is "),
    ],
)
def test_a_spec_file_that_is_none_is_refused_by_its_name(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "spec.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(RequestInvalid) as refused:
        model_spec_from_file(file)
    assert refused.value.message.startswith(said.format(file=file))
