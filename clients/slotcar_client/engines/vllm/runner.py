"""Where adapters come into one of vLLM's model runners: what differs is set on the runner itself, no class is changed.

Invariant: no token leaves a runner that was not computed with the version its request is for; where vLLM's scheduler
could not be told so, the engine ends instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models import supports_lora
from vllm.v1.core.sched.output import SchedulerOutput

from slotcar_client.engines.vllm.batch import Requests
from slotcar_client.engines.vllm.deltas import Deltas
from slotcar_client.engines.vllm.layers import model_spec
from slotcar_client.engines.vllm.managers import WorkerLoRAManager
from slotcar_client.engines.vllm.outputs import marked
from slotcar_client.engines.vllm.ranks import Alone, Group, Ranks
from slotcar_client.engines.vllm.settings import Settings
from slotcar_client.engines.vllm.step import Limits, Steps


class LoRARunner:
    """The places of one runner where adapters come in."""

    def __init__(self, runner: Any, vllm_config: VllmConfig) -> None:
        config = vllm_config.lora_config
        assert config is not None
        self._runner = runner
        self._deltas = Deltas()
        self._requests = Requests()
        ranks: Ranks = Group(get_tp_group().cpu_group) if get_tp_group().world_size > 1 else Alone()
        model = vllm_config.model_config
        limits = Limits(config.max_loras, config.max_cpu_loras or config.max_loras, not _has_state(model))
        self._ranks = ranks
        self._steps = Steps(Settings.from_environment(), ranks, limits, self._deltas)
        self._can_fail = False
        self._is_sampling = False
        self._model_forward: Callable[..., Any] = runner._model_forward
        runner.load_lora_model = self.load_lora_model
        runner.set_active_loras = self.set_active_loras
        runner._model_forward = self.model_forward

    def load_lora_model(self, model: Any, vllm_config: VllmConfig, device: torch.device) -> Any:
        """As the runner's own: gives the model its LoRA layers, and opens the session that serves them."""
        if not supports_lora(model):
            raise ValueError(f"{type(model).__name__} does not support LoRA yet.")
        manager = WorkerLoRAManager(vllm_config, device, model.embedding_modules)
        parts = manager.wrap(model, vllm_config, self._deltas)
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        self._steps.open(model_spec(model, parts, dtype, self._ranks.size))
        manager.serve(self._steps)
        self._runner.lora_manager = manager
        model.compute_logits = partial(self.compute_logits, model.compute_logits)
        return model

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """A step of vLLM's scheduler begins; ours says which versions unfinished requests are for."""
        wanted = getattr(scheduler_output, "slotcar_versions", None)
        self._can_fail = wanted is not None
        self._is_sampling = False
        self._steps.use((), {})
        self._requests.begin(scheduler_output.finished_req_ids, wanted or (), self._steps.adapters)

    def set_active_loras(
        self, input_batch: Any, num_scheduled_tokens: Any, num_sampled_tokens: Any = None, *_: Any
    ) -> None:
        """As the runner's own, by request."""
        samples = [1] * len(num_scheduled_tokens) if num_sampled_tokens is None else num_sampled_tokens
        counts = num_scheduled_tokens, samples
        self._steps.use(*self._requests.scheduled(input_batch, counts, self._runner.requests, self._steps.adapters))

    def model_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner.supports_mm_inputs:  # whose embeddings are looked up before
            self._steps.give_up()
        return self._steps.passed(partial(self._model_forward, *args, **kwargs))

    def compute_logits(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Rows are those of the step, until its tokens are sampled; from then on they are those of a prompt."""
        if self._is_sampling:
            return self._steps.without_head(partial(compute, *args, **kwargs), self._runner.num_prompt_logprobs)
        return self._steps.passed(partial(compute, *args, **kwargs))

    def end(self, output: Any) -> Any:
        """The output with what there is to say of the step. Raises why requests failed, if nobody could end them."""
        self._is_sampling = True
        if output is None:
            return None
        marks = self._steps.marks()
        if (marks.failed or marks.postponed) and not self._can_fail:
            raise RuntimeError(f"requests failed, and vLLM's own scheduler cannot end them alone: {marks}")
        return marked(output, marks)

    def close(self) -> None:
        """Ends the engine's session. Idempotent."""
        self._steps.close()


def _has_state(model_config: Any) -> bool:
    """Whether a pass changes more than the places of its rows in the KV cache, as recurrent layers do."""
    return bool(model_config.is_hybrid or model_config.is_attention_free or model_config.has_inner_state)
