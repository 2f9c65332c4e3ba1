"""The one table of fields that an adapter_config.json may have, and what each means for the result.

Known to every PEFT release from 0.0.2 to 0.21. A field in none of the three groups is refused by name, unless its value
is null, false or empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# They give the result; `config.py` reads them: name → what becomes of it.
EFFECTIVE: Mapping[str, str] = MappingProxyType(
    {
        "peft_type": "`LORA`; any other is refused",
        "r": "the rank, which the tensors must have",
        "lora_alpha": "the scale is `lora_alpha / r`",
        "use_rslora": "the scale is `lora_alpha / √r`",
        "rank_pattern": "the rank of the modules that a pattern matches",
        "alpha_pattern": "the same for `lora_alpha`",
        "bias": "`all` and `lora_only` with `--base-model`, for the modules that have LoRA weights",
        "lora_bias": "the bias of `lora_B` is added, scaled",
        "use_dora": "with `--base-model`; not on experts",
        "target_parameters": "says which parameters of experts the tensors are for",
    }
)

# They cannot change the result, as tensor keys say which modules have weights: name → PEFT's default.
WITHOUT_EFFECT: Mapping[str, object] = MappingProxyType(
    {
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "ensure_weight_tying": False,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": False,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_dropout": 0.0,
        "megatron_core": "megatron.core",
        "merge_weights": False,
        "peft_version": None,
        "qalora_group_size": 16,
        "revision": None,
        "runtime_config": None,
        "target_modules": None,
        "task_type": None,
        # Of initialisations, which `init_lora_weights` names: PEFT keeps them after it has converted an adapter.
        "corda_config": None,
        "eva_config": None,
        "loftq_config": None,
        "lora_ga_config": None,
    }
)


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that changes the result in a way that is not served: why, and what to do."""

    reason: str
    remedy: str = "train or export the adapter without it"
    default: object = None


_FULL_WEIGHTS = "merge it into the base model, or train LoRA weights only"
_ALTERED_BASE = (
    "convert it: save_pretrained(..., path_initial_model_for_weight_conversion=...) writes an adapter for the "
    "unaltered base model"
)

REFUSED: Mapping[str, Refused] = MappingProxyType(
    {
        "alora_invocation_tokens": Refused("an activated LoRA applies only after its invocation tokens"),
        "arrow_config": Refused("Arrow routes each token among several adapters"),
        "enable_lora": Refused("a merged linear layer has LoRA on some of its parts only"),
        "kasa_config": Refused("KaSA alters the base weights"),
        "layer_replication": Refused("the model has repeated layers, which the base model has not"),
        "megatron_config": Refused("Megatron's parallel layers are sharded"),
        "modules_to_save": Refused("whole modules of the base model were trained too", _FULL_WEIGHTS),
        "monteclora_config": Refused("MonteCLoRA samples its weights"),
        "trainable_token_indices": Refused("rows of the embedding were trained too", _FULL_WEIGHTS),
        "use_bdlora": Refused("BD-LoRA has block-diagonal matrices"),
        "use_qalora": Refused("QALoRA pools its input"),
        "velora_config": Refused("VeLoRA is a variant that is not known to be plain LoRA when served"),
    }
)

# Values of init_lora_weights, in lower case, that leave the base model as it is.
INIT_PLAIN = frozenset({"gaussian", "eva", "orthogonal", "mica"})
INIT_REFUSED = Refused(
    "this initialisation altered the base weights that the adapter was trained on", _ALTERED_BASE, default=True
)
INIT_FIELD = "init_lora_weights"
