"""A folder's spec with all that can be asked for is the one that an engine makes of the model itself."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slotcar_client.engines.transformers import model_spec
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.rpc.convert_model import to_model
from slotcar_sidecar.store.model import Wanted, model_spec_from_folder
from transformers import AutoModelForCausalLM, GPTNeoXConfig, JambaConfig, OPTConfig, PreTrainedModel, Qwen3MoeConfig

from tests.adapters import tiny_gpt2, tiny_llama, tiny_qwen2
from tests.corpus.models import tiny_mixtral, tiny_phi3, tiny_qwen2_moe

SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def auto(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config)


def tiny_qwen3_moe() -> Any:
    """Experts in every second layer."""
    widths = {"intermediate_size": 96, "moe_intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16}
    return auto(Qwen3MoeConfig(**SMALL, **widths, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=2))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "gpt2": tiny_gpt2,
    "phi3": tiny_phi3,
    "gpt_neox": lambda: auto(GPTNeoXConfig(**SMALL, intermediate_size=96)),
    "opt": lambda: auto(OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=32)),
    "mixtral": tiny_mixtral,
    "qwen2_moe": tiny_qwen2_moe,
    "qwen3_moe": tiny_qwen3_moe,
}
WITH_EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe"}
CHOICES = [
    Wanted(),
    Wanted(embeddings=True),
    Wanted(tied_head=True),
    Wanted(experts=True),
    Wanted(embeddings=True, tied_head=True, experts=True),
]


def engines(model: PreTrainedModel, wanted: Wanted) -> ModelSpec:
    return to_model(model_spec(model, **wanted._asdict()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_sites_are_the_engines(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(str(tmp_path))
    for wanted in CHOICES:
        asked = wanted._replace(experts=wanted.experts and name in WITH_EXPERTS)
        assert model_spec_from_folder(tmp_path, asked).sites == engines(model, asked).sites, asked


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_that_are_fused_in_the_file_too(name: str, tmp_path: Path) -> None:
    model, wanted = MODELS[name](), Wanted(experts=True)
    model.save_pretrained(str(tmp_path), save_original_format=False)
    assert any(key.endswith("gate_up_proj") for key in header(tmp_path))
    assert model_spec_from_folder(tmp_path, wanted).sites == engines(model, wanted).sites


@pytest.mark.parametrize("build", [tiny_qwen2, tiny_gpt2])
def test_a_tied_head_of_a_base_model_that_was_saved_alone(build: Callable[[], Any], tmp_path: Path) -> None:
    model = build()
    model.base_model.save_pretrained(str(tmp_path))
    found = model_spec_from_folder(tmp_path, Wanted(tied_head=True)).by_name["lm_head"]
    assert (found.in_features, found.out_features) == (64, 256)


def test_a_head_that_is_not_there_and_not_tied_is_said(tmp_path: Path) -> None:
    tiny_llama().base_model.save_pretrained(str(tmp_path))
    assert "no lm_head, and it is not tied" in refusal(tmp_path, Wanted(tied_head=True))


@pytest.mark.parametrize("wanted", [Wanted(embeddings=True), Wanted(tied_head=True)])
def test_an_embedding_of_no_known_name_is_said(wanted: Wanted, tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(str(tmp_path))
    rename(tmp_path, "model.embed_tokens.weight", "model.words.embedding.weight")
    assert "no input embedding" in refusal(tmp_path, wanted)


def test_a_model_without_experts_is_said(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(str(tmp_path))
    assert "no experts" in refusal(tmp_path, Wanted(experts=True))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("experts.3.up_proj.weight", "experts.4.up_proj.weight"),
        ("experts.3.up_proj.weight", "experts.3.side_proj.weight"),
        ("experts.0.gate_proj.weight", "experts.0.gate_proj.bias"),
        ("experts.0.down_proj.weight", "experts.down_proj"),
    ],
)
def test_a_block_with_something_else_among_its_experts_has_no_sites(old: str, new: str, tmp_path: Path) -> None:
    tiny_qwen2_moe().save_pretrained(str(tmp_path))
    for layer in range(2):
        rename(tmp_path, f"model.layers.{layer}.mlp.{old}", f"model.layers.{layer}.mlp.{new}")
    assert "no experts" in refusal(tmp_path, Wanted(experts=True))


def test_experts_of_unequal_shapes_have_no_sites(tmp_path: Path) -> None:
    tiny_qwen2_moe().save_pretrained(str(tmp_path))
    rename(tmp_path, "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.experts.0.swap.weight")
    rename(tmp_path, "model.layers.0.mlp.experts.0.down_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight")
    rename(tmp_path, "model.layers.0.mlp.experts.0.swap.weight", "model.layers.0.mlp.experts.0.down_proj.weight")
    names = model_spec_from_folder(tmp_path, Wanted(experts=True)).by_name
    assert "model.layers.0.mlp.experts.down_proj" not in names
    assert "model.layers.1.mlp.experts.down_proj" in names


def test_a_router_that_is_a_module_of_another_name_is_no_site(tmp_path: Path) -> None:
    """Of Jamba, whose router is a linear module beside the experts."""
    sizes = {"intermediate_size": 96, "num_key_value_heads": 2, "num_experts": 4, "expert_layer_period": 2}
    auto(JambaConfig(**SMALL, **sizes, use_mamba_kernels=False)).save_pretrained(str(tmp_path))
    spec = model_spec_from_folder(tmp_path, Wanted(experts=True))
    assert [site.name for site in spec.sites if site.experts] == [
        "model.layers.1.feed_forward.experts.down_proj",
        "model.layers.1.feed_forward.experts.gate_up_proj",
    ]


def refusal(folder: Path, wanted: Wanted) -> str:
    with pytest.raises(RequestInvalid) as caught:
        model_spec_from_folder(folder, wanted)
    assert caught.value.field == "base_model"
    assert str(folder) in str(caught.value)
    return str(caught.value)


def header(folder: Path) -> dict[str, Any]:
    data = (folder / "model.safetensors").read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return found


def rename(folder: Path, old: str, new: str) -> None:
    """A tensor of the folder's file."""
    path = folder / "model.safetensors"
    data, entries = path.read_bytes(), header(folder)
    body = data[8 + struct.unpack("<Q", data[:8])[0] :]
    entries[new] = entries.pop(old)
    head = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + body)
