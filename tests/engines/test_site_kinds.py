"""DoRA, biases, embeddings, heads and experts: an attached model computes what PEFT does, and base rows keep bits."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import torch
from peft import PeftModel
from slotcar.v1 import model_pb2
from slotcar_client import BASE, Client, errors
from slotcar_client.engines.transformers import attach, model_spec
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from tests.adapters import make_adapter, peft_deltas, tiny_gpt2, tiny_llama, tiny_qwen2, write_raw_adapter
from tests.server import SidecarProcess

TRANSPORTS = ("unary", "stream", "ring", "direct")
_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_mixtral() -> MixtralForCausalLM:
    return _made(MixtralForCausalLM, MixtralConfig(**_TINY, intermediate_size=96, num_local_experts=4))


def tiny_qwen2_moe() -> Qwen2MoeForCausalLM:
    widths = {"intermediate_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
    return _made(Qwen2MoeForCausalLM, Qwen2MoeConfig(**_TINY, **widths, num_experts=4))


def _made(model: type[Any], config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(config).eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "gpt2": tiny_gpt2,
    "mixtral": tiny_mixtral,
    "qwen2_moe": tiny_qwen2_moe,
}
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
        "head": {"target_modules": ["lm_head", "v_proj"]},
        "dora": {"target_modules": ["q_proj", "k_proj", "down_proj"], "use_dora": True},
        "bias": {"target_modules": ["o_proj", "up_proj"], "lora_bias": True},
    },
    "qwen2": {
        "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
        "head": {"target_modules": ["lm_head", "v_proj"]},
        "dora": {"target_modules": ["q_proj", "v_proj", "gate_proj"], "use_dora": True},
        "bias": {"target_modules": ["q_proj", "down_proj"], "lora_bias": True},
    },
    "gpt2": {
        "embedding": {"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True},
        "dora": {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
    },
    "mixtral": {
        "experts": {"target_modules": ["q_proj"], "target_parameters": FUSED},
        "down": {"target_modules": ["v_proj"], "target_parameters": FUSED[1:]},
        "router": {"target_modules": ["o_proj"], "target_parameters": ["mlp.gate.weight"]},
    },
    "qwen2_moe": {"experts": {"target_modules": ["gate_proj"], "target_parameters": FUSED}},
}


@dataclass
class Stage:
    client: Client
    model: PreTrainedModel
    spec: model_pb2.ModelSpec
    adapters: Path

    def peft(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        return logits(PeftModel.from_pretrained(copy.deepcopy(self.model), str(self.adapters / name)).eval(), ids)


@pytest.fixture(scope="module", params=list(MODELS))
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root, model = tmp_path_factory.mktemp("adapters"), MODELS[request.param]()
    base = tmp_path_factory.mktemp("base")
    model.save_pretrained(str(base))
    for seed, (name, settings) in enumerate(CASES[request.param].items()):
        make_adapter(root / name, model, seed=seed, lora_alpha=16, **settings)
    spec = model_spec(model, embeddings=True, tied_head=True, experts=True)
    sites = base / "sites.json"
    sites.write_text(json.dumps(_as_dict(spec)), encoding="utf-8")
    extra = ("--base-model", str(base), "--model-spec", str(sites), "--planes", "stream,ring,direct")
    with (
        SidecarProcess(tmp_path_factory.mktemp("s"), root, slots=4, extra=extra) as sidecar,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
        client.session("shape", model_spec=spec),
    ):
        for name in CASES[request.param]:
            client.load(name, root / name)
        yield Stage(client, model, spec, root)


def _as_dict(spec: model_pb2.ModelSpec) -> dict[str, Any]:
    """As a server reads it from a file."""
    kinds = {model_pb2.SITE_KIND_EMBEDDING: "embedding", model_pb2.SITE_KIND_EXPERTS: "experts"}
    sites = [
        {
            "name": site.name,
            "in_features": site.in_features,
            "out_features": site.out_features,
            "kind": kinds.get(site.kind, "linear"),
            "experts": site.experts,
            "parts": [{"name": part.name, "out_features": part.out_features} for part in site.parts],
        }
        for site in spec.sites
    ]
    return {"sites": sites}


def prompts(batch: int = 3, length: int = 6) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(3))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids).logits
        return result


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def assert_base_row(found: torch.Tensor, plain: torch.Tensor, model: PreTrainedModel) -> None:
    """The row of a mixed batch has the bits that it has in a plain one.

    Not behind a layer of experts: each multiplies all rows that are routed to it at once, and on some processors the
    last bits of a row depend on how many those are, in the plain model too.
    """
    if hasattr(model.config, "num_experts_per_tok"):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)
    else:
        assert torch.equal(found, plain)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_logits_are_pefts_for_each_adapter_and_the_base_models_beside_it(stage: Stage, transport: str) -> None:
    ids, model = prompts(), stage.model
    plain = logits(model, ids)
    with (
        stage.client.session("test", model_spec=stage.spec, transport=transport) as session,
        attach(model, session),
    ):
        assert session.transport == transport
        with session.rows([BASE, BASE, BASE]):
            assert torch.equal(logits(model, ids), plain)
        for name in sorted(path.name for path in stage.adapters.iterdir()):
            wanted = stage.peft(name, ids)
            with session.rows([name, BASE, name]):
                found = [logits(model, ids) for _ in range(2)]
            for result in found:
                close(result[[0, 2]], wanted[[0, 2]])
                assert_base_row(result[1], plain[1], model)
                assert not torch.allclose(result[0], plain[0], atol=1e-3), name
    assert torch.equal(logits(model, ids), plain)


def test_adapters_of_several_kinds_in_one_batch(stage: Stage) -> None:
    names = sorted(path.name for path in stage.adapters.iterdir())
    ids = prompts(len(names))
    wanted = torch.stack([stage.peft(name, ids)[row] for row, name in enumerate(names)])
    with (
        stage.client.session("test", model_spec=stage.spec) as session,
        attach(stage.model, session),
        session.rows(names),
    ):
        close(logits(stage.model, ids), wanted)


# What an adapter has for each expert of the layer that Mixtral had before its experts were one module.
OLD_NAMES = {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}


def test_adapters_of_the_time_when_each_expert_was_a_module(tmp_path: Path) -> None:
    """The oracle is the base model with the products added to its weights."""
    model, generator = tiny_mixtral(), torch.Generator().manual_seed(5)
    tensors, merged = {}, copy.deepcopy(model)
    block, block_merged = "model.layers.1.block_sparse_moe", merged.model.layers[1].mlp

    def lora(module: str, in_features: int, out_features: int) -> torch.Tensor:
        a, b = (torch.randn(shape, generator=generator) * 0.1 for shape in ((4, in_features), (out_features, 4)))
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        return 2.0 * b @ a

    with torch.no_grad():
        block_merged.gate.weight += lora(f"{block}.gate", 64, 4)
        for expert in (0, 1, 3):
            for name, (in_features, out_features) in OLD_NAMES.items():
                delta = lora(f"{block}.experts.{expert}.{name}", in_features, out_features)
                if name == "w2":
                    block_merged.experts.down_proj[expert] += delta
                else:
                    start = 96 * (name == "w3")
                    block_merged.experts.gate_up_proj[expert, start : start + 96] += delta
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    folder = write_raw_adapter(tmp_path / "adapters" / "old", config, tensors)
    ids, spec = prompts(), model_spec(model, experts=True)
    with (
        SidecarProcess(tmp_path, tmp_path / "adapters") as sidecar,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
        client.session("test", model_spec=spec) as session,
    ):
        client.load("old", folder)
        with attach(model, session), session.rows([BASE, "old", "old"]):
            found = logits(model, ids)
    close(found[1:], logits(merged, ids)[1:])
    assert_base_row(found[0], logits(model, ids)[0], model)


def test_an_engine_with_packed_sites(tmp_path: Path) -> None:
    """The adapter has q and v; the engine asks for q, k and v at one site, as vLLM's layers are."""
    model = tiny_llama()
    folder = make_adapter(tmp_path / "adapters" / "sql", model, target_modules=["q_proj", "v_proj"], r=8)
    path = "model.layers.0.self_attn"
    widths = {f"{path}.q_proj": 64, f"{path}.k_proj": 32, f"{path}.v_proj": 32}
    sites = [
        model_pb2.Site(
            name=f"{block}.qkv_proj",
            in_features=64,
            out_features=128,
            kind=model_pb2.SITE_KIND_LINEAR,
            parts=[
                model_pb2.SitePart(name=part.replace(path, block), out_features=width, copies=1)
                for part, width in widths.items()
            ],
        )
        for block in (path, path.replace("0", "1"))
    ]
    deltas = peft_deltas(folder, model)
    with (
        SidecarProcess(tmp_path, tmp_path / "adapters") as sidecar,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
        client.session("engine", model_spec=model_pb2.ModelSpec(sites=sites, tensor_parallel=1)) as session,
    ):
        client.load("sql", folder)
        mapping = session.set_mapping([("sql", 3)])
        assert session.sites_of(mapping) == (frozenset(site.name for site in sites),)
        for part, start in ((f"{path}.q_proj", 0), (f"{path}.v_proj", 96)):
            x, wanted = deltas[part]
            found = session.forward({f"{path}.qkv_proj": x})[f"{path}.qkv_proj"]
            close(found[:, start : start + wanted.shape[1]], wanted)
            assert not found[:, 64:96].any(), "the adapter has nothing for k"


def test_what_few_adapters_target_takes_no_slot_memory_unless_it_is_asked_for() -> None:
    def kinds(model: PreTrainedModel, **wanted: bool) -> list[int]:
        return sorted({site.kind for site in model_spec(model, **wanted).sites})

    linear, embedding, experts = (
        model_pb2.SITE_KIND_LINEAR,
        model_pb2.SITE_KIND_EMBEDDING,
        model_pb2.SITE_KIND_EXPERTS,
    )
    assert kinds(tiny_mixtral()) == [linear]
    assert kinds(tiny_mixtral(), embeddings=True) == [linear, embedding]
    assert kinds(tiny_mixtral(), experts=True) == [linear, experts]
    heads = [
        [site.name for site in model_spec(tiny_qwen2(), tied_head=tied).sites if site.name == "lm_head"]
        for tied in (False, True)
    ]
    assert heads == [[], ["lm_head"]]


def test_a_batch_of_another_size_is_refused_at_experts_too(tmp_path: Path) -> None:
    model = tiny_mixtral()
    folder = make_adapter(tmp_path / "adapters" / "moe", model, target_modules=[], target_parameters=FUSED)
    with (
        SidecarProcess(tmp_path, tmp_path / "adapters") as sidecar,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
        client.session("test", model_spec=model_spec(model, experts=True)) as session,
    ):
        client.load("moe", folder)
        with attach(model, session), session.rows(["moe", BASE]), pytest.raises(errors.ShapeMismatch):
            logits(model, prompts(4))
