"""The corpus: every variant of an adapter by its name, and what is expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from slotcar_sidecar.core.errors import Reason

from tests.corpus.build import Config, Recipe, Tensors

_QV = {"target_modules": ["q_proj", "v_proj"]}
_CONV1D = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
_EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
_ALL = {"target_modules": "all-linear"}
_PREFIX = "base_model.model."
_Q0 = f"{_PREFIX}model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Refusal:
    """Reason and place of a refusal, and a part of what it says."""

    reason: Reason
    says: str
    field: str | None = None
    tensor: str | None = None


@dataclass(frozen=True)
class Variant:
    """`base`: whether the sidecar is started with --base-model. `fast`: part of the short run."""

    recipe: Recipe
    base: bool = False
    refusal: Refusal | None = None
    fast: bool = False


def _plain(model: str, fast: bool = False, base: bool = False, **settings: Any) -> Variant:
    return Variant(Recipe(model, settings), base=base, fast=fast)


# Supported: equal to PEFT.

SUPPORTED: Mapping[str, Variant] = {
    "two modules": _plain("llama", fast=True, **_QV),
    "all-linear": _plain("llama", **_ALL),
    "rank-stabilised scale": _plain("llama", use_rslora=True, r=8, lora_alpha=16, **_QV),
    "a fractional alpha": _plain("llama", lora_alpha=2.5, **_QV),
    "alpha 0": _plain("llama", lora_alpha=0, **_QV),
    "rank 1": _plain("llama", r=1, **_ALL),
    "a rank above the width": _plain("llama", r=96, **_QV),
    "rank pattern": _plain("llama", rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 6}, **_ALL),
    "rank pattern, regular expression": _plain("llama", rank_pattern={r"layers\.[1-9]+\..*(q|k)_proj": 2}, **_ALL),
    "rank pattern, anchored": _plain("llama", rank_pattern={r"^model.layers.0.self_attn.q_proj": 16}, **_ALL),
    "alpha pattern": _plain("llama", alpha_pattern={r".*\.self_attn\.\w+": 3, "down_proj": 5.5}, **_ALL),
    "both patterns, rank-stabilised": _plain(
        "llama", fast=True, rank_pattern={"k_proj": 3}, alpha_pattern={"k_proj": 7}, use_rslora=True, **_ALL
    ),
    "layers_to_transform": _plain("llama", layers_to_transform=[1], **_QV),
    "layers_pattern": _plain("llama", layers_to_transform=[0], layers_pattern="layers", **_QV),
    "regular expression of modules": _plain("llama", target_modules=r".*layers\.0\..*(q|up)_proj"),
    "exclude_modules": _plain("llama", exclude_modules=["k_proj"], **_ALL),
    "gaussian, dropout": _plain("llama", init_lora_weights="gaussian", lora_dropout=0.1, **_QV),
    "orthogonal": _plain("llama", init_lora_weights="orthogonal", **_QV),
    "MiCA": _plain("llama", init_lora_weights="mica", target_modules=["q_proj"]),
    "bfloat16 file": Variant(Recipe("llama", _ALL, dtype=torch.bfloat16)),
    "float16 file": Variant(Recipe("llama", _ALL, dtype=torch.float16)),
    "head": _plain("llama", target_modules=["q_proj", "lm_head"]),
    "head, with a copy of the base's": Variant(
        Recipe("llama", {"target_modules": ["q_proj", "lm_head"]}, embeddings=True), base=True, fast=True
    ),
    "embedding": _plain("llama", fast=True, target_modules=["embed_tokens", "q_proj"]),
    "embedding, with copies of the base's": Variant(
        Recipe("llama", {"target_modules": ["embed_tokens", "q_proj"]}, embeddings="auto"), base=True
    ),
    "embedding and head": _plain("llama", target_modules=["embed_tokens", "lm_head"]),
    "embedding alone": _plain("llama", target_modules=["embed_tokens"], rank_pattern={"embed_tokens": 2}),
    "lora_bias": _plain("llama", fast=True, lora_bias=True, **_ALL),
    "lora_bias, rank-stabilised": _plain("llama", lora_bias=True, use_rslora=True, **_QV),
    "DoRA": _plain("llama", fast=True, base=True, use_dora=True, **_ALL),
    "DoRA, rank pattern, rank-stabilised": _plain(
        "llama", base=True, use_dora=True, use_rslora=True, rank_pattern={"q_proj": 2}, **_ALL
    ),
    "DoRA at the head": _plain("llama", base=True, use_dora=True, target_modules=["lm_head"]),
    "DoRA at the embedding": _plain("llama", base=True, use_dora=True, target_modules=["embed_tokens", "q_proj"]),
    "DoRA, float16 file": Variant(Recipe("llama", {"use_dora": True, **_QV}, dtype=torch.float16), base=True),
    "all-linear beside biases": _plain("qwen2", **_ALL),
    "bias lora_only": _plain("qwen2", base=True, fast=True, bias="lora_only", **_ALL),
    "bias lora_only where there is none": _plain("llama", bias="lora_only", **_QV),
    "bias lora_only, DoRA": _plain("qwen2", base=True, fast=True, bias="lora_only", use_dora=True, **_ALL),
    "bias all, all of them at targets": _plain("qwen2", base=True, bias="all", **_ALL),
    "DoRA beside biases": _plain("qwen2", base=True, use_dora=True, **_ALL),
    "lora_bias beside biases": _plain("qwen2", lora_bias=True, **_QV),
    "lora_bias and bias lora_only": _plain("qwen2", base=True, lora_bias=True, bias="lora_only", **_QV),
    "tied embedding": _plain("qwen2", target_modules=["embed_tokens"]),
    "tied head": _plain("qwen2", target_modules=["lm_head"]),
    "DoRA at a tied head": _plain("qwen2", base=True, use_dora=True, target_modules=["lm_head"]),
    "tied, both sides": _plain("qwen2", target_modules=["embed_tokens"], ensure_weight_tying=True),
    "tied, with a copy of the base's": Variant(
        Recipe("qwen2", {"target_modules": ["embed_tokens"]}, embeddings=True), base=True
    ),
    "Conv1D": _plain("gpt2", fast=True, **_CONV1D),
    "Conv1D, the flag left out": _plain("gpt2", target_modules=["c_attn"]),
    "Conv1D, DoRA": _plain("gpt2", base=True, fast=True, use_dora=True, **_CONV1D),
    "Conv1D, bias lora_only": _plain("gpt2", base=True, bias="lora_only", **_CONV1D),
    "Conv1D, lora_bias": _plain("gpt2", lora_bias=True, **_CONV1D),
    "token and position embeddings": _plain("gpt2", target_modules=["wte", "wpe"]),
    "packed q, k and v": _plain("phi3", fast=True, target_modules=["qkv_proj"]),
    "packed modules, all of them": _plain("phi3", rank_pattern={"gate_up_proj": 6}, **_ALL),
    "packed modules, DoRA": _plain("phi3", base=True, use_dora=True, **_ALL),
    "fused experts": _plain("mixtral", fast=True, **_EXPERTS),
    "fused experts, gate and up": _plain("mixtral", target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]),
    "fused experts, down": _plain("mixtral", target_modules=[], target_parameters=["experts.down_proj"]),
    "fused experts and attention": _plain("mixtral", **{**_EXPERTS, **_QV}),
    "fused experts, rank pattern": _plain("mixtral", rank_pattern={"experts.gate_up_proj": 2}, **_EXPERTS),
    "fused experts, alpha pattern, rank-stabilised": _plain(
        "mixtral", alpha_pattern={"experts.down_proj": 3}, use_rslora=True, **_EXPERTS
    ),
    "fused experts, router": _plain("mixtral", target_modules=[], target_parameters=["mlp.gate.weight"]),
    "fused experts, bfloat16 file": Variant(Recipe("mixtral", _EXPERTS, dtype=torch.bfloat16)),
    "fused experts of another model": _plain("qwen2-moe", **_EXPERTS),
    "shared expert and attention": _plain("qwen2-moe", **_ALL),
    "shared expert, DoRA": _plain("qwen2-moe", base=True, use_dora=True, **_ALL),
    "one module for each expert": _plain("old mixtral", fast=True, target_modules=["w1", "w2", "w3"]),
    "one module for each expert, router": _plain("old mixtral", target_modules=["gate", "w1"]),
    "one module for each expert, another layout": _plain(
        "old qwen2-moe", rank_pattern={"experts.0.up_proj": 2}, target_modules=["gate_proj", "up_proj", "down_proj"]
    ),
}


# Keys and files as others write them: equal to PEFT's reading of the original.


def _without_prefix(config: Config, tensors: Tensors) -> None:
    _rename(tensors, lambda key: key.removeprefix(_PREFIX))


def _with_infix(config: Config, tensors: Tensors) -> None:
    _rename(
        tensors,
        lambda key: f"{key}.default" if not key.endswith((".weight", ".bias")) else _before_last(key, "default"),
    )


def _with_named_infix(config: Config, tensors: Tensors) -> None:
    _rename(tensors, lambda key: _before_last(key.removeprefix(_PREFIX), "my-adapter_2"))


def _with_magnitude_modules(config: Config, tensors: Tensors) -> None:
    _rename(tensors, lambda key: f"{key}.default.weight" if "magnitude" in key else _before_last(key, "default"))


def _before_last(key: str, infix: str) -> str:
    head, _, last = key.rpartition(".")
    return f"{head}.{infix}.{last}"


def _rename(tensors: Tensors, new: Any) -> None:
    renamed = {new(key): tensor for key, tensor in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


def _minimal(config: Config, tensors: Tensors) -> None:
    for name in set(config) - {"peft_type", "r", "lora_alpha"}:
        del config[name]


def _twelve_fields(config: Config, tensors: Tensors) -> None:
    _minimal(config, tensors)
    config.update(bias="none", enable_lora=None, fan_in_fan_out=False, inference_mode=True, merge_weights=False)
    config.update(lora_dropout=0.05, base_model_name_or_path="org/model", modules_to_save=None, task_type="CAUSAL_LM")


def _future_fields(config: Config, tensors: Tensors) -> None:
    config.update(use_future=False, future_config=None, future_list=[])


REWRITTEN: Mapping[str, Variant] = {
    "keys without a prefix": Variant(Recipe("llama", _QV, edit=_without_prefix), fast=True),
    "keys with an adapter's name": Variant(Recipe("llama", {"target_modules": ["embed_tokens"]}, edit=_with_infix)),
    "keys with another name, no prefix": Variant(Recipe("llama", _QV, edit=_with_named_infix)),
    "DoRA, magnitudes as modules": Variant(
        Recipe("llama", {"use_dora": True, **_QV}, edit=_with_magnitude_modules), base=True
    ),
    "three fields": Variant(Recipe("llama", _QV, edit=_minimal), fast=True),
    "the fields of the first releases": Variant(Recipe("llama", _QV, edit=_twelve_fields)),
    "unknown fields without a value": Variant(Recipe("llama", _QV, edit=_future_fields)),
    "two shards": Variant(Recipe("llama", _QV, shards=2), fast=True),
    "fused experts in three shards": Variant(Recipe("mixtral", _EXPERTS, shards=3)),
}


# Refused, each with where it is and what to do.

_INVALID, _UNSUPPORTED = Reason.ADAPTER_INVALID, Reason.ADAPTER_UNSUPPORTED


def _field(name: str, says: str, model: str = "llama", **settings: Any) -> Variant:
    return Variant(Recipe(model, _QV | settings), refusal=Refusal(_UNSUPPORTED, says, field=name))


def _set(name: str, value: Any, says: str, reason: Reason = _UNSUPPORTED) -> Variant:
    def edit(config: Config, tensors: Tensors) -> None:
        config[name] = value

    return Variant(Recipe("llama", _QV, edit=edit), refusal=Refusal(reason, says, field=name), fast=True)


def _tensor(
    key: str, value: torch.Tensor | None, says: str, reason: Reason = _INVALID, named: str | None = ""
) -> Variant:
    def edit(config: Config, tensors: Tensors) -> None:
        tensors.pop(key, None)
        if value is not None:
            tensors[key] = value.clone()

    refusal = Refusal(reason, says, tensor=key if named == "" else named)
    return Variant(Recipe("llama", _QV, edit=edit), refusal=refusal, fast=True)


def _other_peft(kind: str, peft_type: str, **settings: Any) -> Variant:
    refusal = Refusal(_UNSUPPORTED, f"peft_type {peft_type}: only LORA", field="peft_type")
    return Variant(Recipe("llama", {"task_type": "CAUSAL_LM", **settings}, kind=kind), refusal=refusal)


def _needs(recipe: Recipe, says: str, **place: str) -> Variant:
    return Variant(recipe, refusal=Refusal(_UNSUPPORTED, says, **place))


def _trained_copy(config: Config, tensors: Tensors) -> None:
    tensors[f"{_PREFIX}model.embed_tokens.base_layer.weight"] += 1


def _of_another_model(config: Config, tensors: Tensors) -> None:
    for key in sorted(tensors):
        if key.startswith(_Q0):
            tensors[key.replace("q_proj", "x_proj")] = tensors.pop(key).clone()


REFUSED: Mapping[str, Variant] = {
    "DoRA without the base model": _needs(Recipe("llama", {"use_dora": True, **_QV}), "--base-model", field="use_dora"),
    "bias lora_only without the base model": _needs(
        Recipe("qwen2", {"bias": "lora_only", **_QV}), "--base-model", field="bias"
    ),
    "copies without the base model": _needs(
        Recipe("llama", {"target_modules": ["lm_head"]}, embeddings=True),
        "--base-model",
        tensor=f"{_PREFIX}lm_head.base_layer.weight",
    ),
    "bias all, with layer norms": Variant(
        Recipe("gpt2", {"bias": "all", **_CONV1D}),
        base=True,
        refusal=Refusal(_UNSUPPORTED, "no LoRA", tensor=f"{_PREFIX}transformer.h.0.ln_1.bias"),
    ),
    "a trained embedding": Variant(
        Recipe("llama", {"target_modules": ["embed_tokens"]}, embeddings=True, edit=_trained_copy),
        base=True,
        refusal=Refusal(_UNSUPPORTED, "trained too", tensor=f"{_PREFIX}model.embed_tokens.base_layer.weight"),
    ),
    "a resized vocabulary": Variant(
        Recipe("llama", _QV, embeddings=True, resize=260),
        base=True,
        refusal=Refusal(_UNSUPPORTED, "resized", tensor=f"{_PREFIX}lm_head.weight"),
    ),
    "a resized vocabulary with LoRA on the embedding": Variant(
        Recipe("llama", {"target_modules": ["embed_tokens"]}, embeddings=True, resize=260),
        base=True,
        refusal=Refusal(_UNSUPPORTED, "resized", tensor=f"{_PREFIX}model.embed_tokens.base_layer.weight"),
    ),
    "DoRA for modules that the base model has not": Variant(
        Recipe("llama", {"use_dora": True, **_QV}, edit=_of_another_model),
        base=True,
        refusal=Refusal(
            _INVALID, "another base model", tensor=f"{_PREFIX}model.layers.0.self_attn.x_proj.lora_magnitude_vector"
        ),
    ),
    "modules_to_save, head": _field("modules_to_save", "whole modules", modules_to_save=["lm_head"]),
    "modules_to_save, norms": _field("modules_to_save", "whole modules", modules_to_save=["norm"]),
    "trainable tokens": _field("trainable_token_indices", "rows of the embedding", trainable_token_indices=[1, 2]),
    "PiSSA": _field("init_lora_weights", "altered the base", init_lora_weights="pissa"),
    "OLoRA": _field("init_lora_weights", "altered the base", init_lora_weights="olora"),
    "LoftQ": _set("init_lora_weights", "loftq", "altered the base"),
    "CorDA": _set("init_lora_weights", "corda", "altered the base"),
    "aLoRA": _field("alora_invocation_tokens", "invocation", alora_invocation_tokens=[1]),
    "layer replication": _field("layer_replication", "repeated layers", layer_replication=[[0, 2], [1, 2]]),
    "QALoRA": _set("use_qalora", True, "pools its input"),
    "BD-LoRA": _set("use_bdlora", {"nblocks": 2}, "block-diagonal"),
    "Arrow": _set("arrow_config", {"top_k": 3}, "routes each token"),
    "KaSA": _set("kasa_config", {"beta": 1e-4}, "alters the base"),
    "VeLoRA": _set("velora_config", {"num_groups": 64}, "variant"),
    "MonteCLoRA": _set("monteclora_config", {"num_samples": 4}, "samples"),
    "Megatron": _set("megatron_config", {"tensor_model_parallel_size": 2}, "sharded"),
    "enable_lora": _set("enable_lora", [True, False, True], "some of its parts"),
    "an unknown field": _set("use_future", True, "not known"),
    "AdaLoRA": _other_peft("AdaLoraConfig", "ADALORA", total_step=10, **_QV),
    "LoHa": _other_peft("LoHaConfig", "LOHA", **_QV),
    "LoKr": _other_peft("LoKrConfig", "LOKR", **_QV),
    "VeRA": _other_peft("VeraConfig", "VERA", target_modules=["q_proj"]),
    "IA3": _other_peft("IA3Config", "IA3", target_modules=["k_proj"], feedforward_modules=[]),
    "OFT": _other_peft("OFTConfig", "OFT", oft_block_size=4, **_QV),
    "layer norm tuning": _other_peft("LNTuningConfig", "LN_TUNING", target_modules=["input_layernorm"]),
    "prompt tuning": _other_peft("PromptTuningConfig", "PROMPT_TUNING", num_virtual_tokens=2),
    "no rank": _set("r", None, "nothing for r", _INVALID),
    "a rank of the wrong type": _set("r", "4", '"4" for r', _INVALID),
    "another rank than the tensors'": _set("r", 8, "has rank 4", _INVALID),
    "a bias of an unknown kind": _set("bias", "some", "none or all or lora_only", _INVALID),
    "DoRA without magnitudes": _set("use_dora", True, "no magnitude", _INVALID),
    "lora_bias without biases": _set("lora_bias", True, "no lora_bias", _INVALID),
    "B is missing": _tensor(f"{_Q0}.lora_B.weight", None, "no lora_B", named=f"{_Q0}.lora_A.weight"),
    "NaN": _tensor(f"{_Q0}.lora_B.weight", torch.full((64, 4), float("nan")), "not finite"),
    "another rank in A and B": _tensor(f"{_Q0}.lora_B.weight", torch.ones(64, 5), "has rank 4"),
    "integers": _tensor(f"{_Q0}.lora_B.weight", torch.ones(64, 4, dtype=torch.int32), "dtype I32"),
    "8-bit floats": _tensor(
        f"{_Q0}.lora_B.weight", torch.ones(64, 4).to(torch.float8_e4m3fn), "dtype F8_E4M3", _UNSUPPORTED
    ),
    "a stray tensor": _tensor("something", torch.ones(1), "no LoRA weight"),
    "a full norm": _tensor(f"{_PREFIX}model.norm.weight", torch.ones(64), "full weights", _UNSUPPORTED),
    "a part of an unknown variant": _tensor(f"{_Q0}.lora_diag", torch.ones(4), "not known", _UNSUPPORTED),
    "magnitudes without use_dora": _tensor(f"{_Q0}.lora_magnitude_vector", torch.ones(64), "use_dora false"),
    "two adapters": _tensor(
        f"{_Q0.replace('.0.', '.7.')}.lora_A.other.weight", torch.ones(4, 64), "several", named=None
    ),
}
