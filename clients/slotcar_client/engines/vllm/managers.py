"""vLLM's LoRA managers without any weights: a layer gets a `Layer` in the place of its stacked tensors, and to load an
adapter is to hold it at the sidecar.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY, LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.models import supports_multimodal

from slotcar_client.engines.vllm.deltas import Deltas, Layer
from slotcar_client.engines.vllm.failures import as_text
from slotcar_client.engines.vllm.layers import Part, parts_of
from slotcar_client.engines.vllm.punica import PunicaWrapper
from slotcar_client.engines.vllm.step import Steps
from slotcar_client.errors import SlotcarError


class ModelManager(LRUCacheLoRAModelManager):
    """Wraps a model's layers as vLLM does. `parts` are their sites, once it is made."""

    def __init__(self, *args: Any, deltas: Deltas, **kwargs: Any) -> None:
        self.parts: list[Part] = []
        self._deltas = deltas
        super().__init__(*args, **kwargs)
        self._free_unused()

    @property
    def lora_slots(self) -> int:
        """None: slots are the sidecar's. Layers are made with stacked tensors for as many adapters."""
        return 0

    def _init_punica_wrapper(self, max_num_batched_tokens: int, vllm_config: VllmConfig) -> None:  # noqa: ARG002
        self.supports_mm = supports_multimodal(self.model) and hasattr(self.model, "get_mm_mapping")
        self.supports_tower_connector_lora = False
        prefix = DEFAULT_LANGUAGE_WRAPPER_KEY
        if self.supports_mm:
            self.mm_mapping = self.model.get_mm_mapping()
            prefix = self.mm_mapping.language_model[0]
        self.punica_wrapper_mapping = {prefix: PunicaWrapper(max_num_batched_tokens, self.max_num_seqs, self.device)}

    def register_module(self, module_name: str, module: BaseLayerWithLoRA) -> None:
        """Raises ModelMismatch for a layer that slotcar cannot serve."""
        super().register_module(module_name, module)
        parts = parts_of(module_name, module, self._packed(module_name))
        self.parts.extend(parts)
        layer = Layer(self._deltas, parts, _kind(module))
        module.lora_a_stacked = module.lora_b_stacked = layer
        if isinstance(module, VocabParallelEmbeddingWithLoRA):
            # The layer looks each token up in its A and hands on what it finds: the token itself.
            module.lora_a_stacked_2d = torch.arange(module.base_layer.org_vocab_size).unsqueeze(1).to(self.device)

    def _packed(self, module_name: str) -> Sequence[str]:
        leaf = module_name.rpartition(".")[2]
        return self.packed_modules_mapping.get(leaf) or [leaf]

    def _free_unused(self) -> None:
        """A head that is tied to the embedding is wrapped, though it only lends its weight to the logits."""
        for module in self.model.modules():
            if isinstance(module, BaseLayerWithLoRA) and module not in self.modules.values():
                module.lora_a_stacked = module.lora_b_stacked = None


class WorkerLoRAManager(LRUCacheWorkerLoRAManager):
    """What vLLM's runner asks of its adapters, by their ids."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, embedding_modules: dict[str, str]) -> None:
        super().__init__(vllm_config, device, embedding_modules)
        self._dummies: set[int] = set()
        self._steps: Steps | None = None

    def wrap(self, model: torch.nn.Module, vllm_config: VllmConfig, deltas: Deltas) -> list[Part]:
        """Puts LoRA layers into the model; returns their sites."""
        self._manager_cls = partial(ModelManager, deltas=deltas)
        self.create_lora_manager(model, vllm_config)
        parts: list[Part] = self._adapter_manager.parts
        return parts

    def serve(self, steps: Steps) -> None:
        """What is loaded from now on is the sidecar's."""
        self._steps = steps

    @property
    def steps(self) -> Steps:
        assert self._steps is not None
        return self._steps

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:  # noqa: ARG002
        """For vLLM's warm-up, whose rows are the base model's."""
        self._dummies.add(lora_request.lora_int_id)
        return True

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:  # noqa: ARG002
        """For vLLM's warm-up only: the steps of requests are told `Steps.use`."""
        self.steps.use([], {})

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Holds the adapter's version. Raises RuntimeError, as vLLM passes on nothing but an error's text."""
        known = lora_request.lora_int_id in self.steps.adapters.ids
        try:
            self.steps.adapters.admit(lora_request)
        except SlotcarError as error:
            raise RuntimeError(as_text(error)) from error
        return not known

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forgets the id; the adapter stays the sidecar's, and requests that have it go on."""
        return self.steps.adapters.drop(adapter_id)

    def remove_all_adapters(self) -> None:
        """After a warm-up, or when the base weights change: what is held does not depend on either."""
        self._dummies.clear()

    def pin_adapter(self, adapter_id: int) -> bool:
        """Asks the sidecar to keep the adapter's name resident.

        Raises ValueError for an id that is not known, RuntimeError as `add_adapter` does.
        """
        ref = self.steps.adapters.ref_of(adapter_id)
        if ref is None:
            raise ValueError(f"Pinning failed. LoRA {adapter_id} is not registered.")
        try:
            self.steps.keep(ref)
        except SlotcarError as error:
            raise RuntimeError(as_text(error)) from error
        return True

    def list_adapters(self) -> set[int]:
        return self.steps.adapters.ids | self._dummies

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return default_rank

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        raise NotImplementedError("adapters are loaded by the sidecar")


def _kind(module: BaseLayerWithLoRA) -> str:
    if isinstance(module, VocabParallelEmbeddingWithLoRA):
        return "embedding"
    return "head" if isinstance(module, LogitsProcessorWithLoRA) else "linear"
