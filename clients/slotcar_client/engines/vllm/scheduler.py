"""vLLM's schedulers with what slotcar needs of them: they end requests whose adapter is gone, one by one, keep to the
slots that this engine can have, and tell the workers which versions are still wanted.

Invariants: a token that was computed without its adapter reaches nobody, and no KV block that was computed so is found
again by the prefix cache. No step has more distinct adapters than `_slots`, once the workers have said how many.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Set
from typing import Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from slotcar_client.engines.vllm import failures, versions

_log = logging.getLogger(__name__)


class _SlotcarScheduling(Scheduler):
    """What both of vLLM's schedulers get; in the order of resolution it comes before them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        versions.check(versions.SCHEDULER_HOOKS)
        super().__init__(*args, **kwargs)
        # A copy of its own: the scheduler's limit follows the sidecar's slots, the workers' stays as configured.
        self.lora_config: Any = copy.copy(self.lora_config)
        self._max_loras = self.lora_config.max_loras if self.lora_config else 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As vLLM's; the output says which versions unfinished requests are for, so that the workers hold them."""
        if self.lora_config:
            self._preempt_beyond_slots()
        output = super().schedule(throttle_prefills)
        output.slotcar_versions = frozenset(
            request.lora_request.lora_name for request in self.requests.values() if request.lora_request
        )
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's, for the requests whose adapters were there in this step.

        To vLLM those that failed look as if aborted during the step, those that must be run again as if preempted.
        """
        slots = getattr(model_runner_output, "slotcar_slots", None)
        if slots is not None and self.lora_config:
            self._follow_slots(slots)
        self._take_back(getattr(model_runner_output, "slotcar_postponed", None) or frozenset())
        ended = self._end_failed(getattr(model_runner_output, "slotcar_failed", None) or {})
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request, text in ended:
            _append_failure(outputs, request, text)
        return outputs

    def _follow_slots(self, slots: int) -> None:
        """At least one: in a step without adapters nobody would see that there are slots again."""
        limit = max(1, min(slots, self._max_loras))
        if limit != self.lora_config.max_loras:
            _log.info("at most %d adapters in a step, of %d configured", limit, self._max_loras)
            self.lora_config.max_loras = limit

    def _preempt_beyond_slots(self) -> None:
        """Running requests go back to the queue, the latest first, while their adapters are too many for a step."""
        allowed: set[int] = set()
        beyond: list[Request] = []
        for request in self.running:
            number = request.lora_request.lora_int_id if request.lora_request else 0
            if number and number not in allowed:
                if len(allowed) == self.lora_config.max_loras:
                    beyond.append(request)
                    continue
                allowed.add(number)
        self._preempt(beyond)

    def _preempt(self, requests: list[Request]) -> None:
        """Puts running requests back at the head of the queue, in their order; what is under way of them is dropped."""
        now = time.monotonic()
        for request in reversed(requests):
            self.running.remove(request)
            self._preempt_request(request, now, drop_stale_output=True)
            # It may run again in the next step; the workers must then not take it for one that never stopped.
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _take_back(self, postponed: Set[str]) -> None:
        """Preempts requests that had no slot in the step, with all who share a block with one."""
        if postponed:
            affected = self._spoil(postponed)
            self._preempt([request for request in self.running if request.request_id in affected])

    def _end_failed(self, failed: Mapping[str, str]) -> list[tuple[Request, str]]:
        """Ends the failed requests, and all who share a block with one; each with its reason."""
        if not failed:
            return []
        shared = next(iter(failed.values()))
        ended = self.finish_requests(self._spoil(failed.keys()), RequestStatus.FINISHED_ERROR)
        reasons = {request.request_id: failed.get(request.request_id, shared) for request in ended}
        for name, reason in reasons.items():
            _log.error("request %s ends: %s", name, reason)
        return [(request, reasons[request.request_id]) for request in ended]

    def _spoil(self, names: Set[str]) -> set[str]:
        """Makes the prefix cache forget the requests' blocks; returns them with the running ones that share a block.

        Their KV was computed without the adapter. vLLM registers a block before it is computed, so that with steps
        under way others may have found it there.
        """
        affected = {name for name in names if name in self.requests}
        blocks = {block for name in affected for block in self._blocks(name)}
        self.kv_cache_manager.evict_blocks(blocks)
        for request in self.running:
            if not blocks.isdisjoint(self._blocks(request.request_id)):
                affected.add(request.request_id)
        return affected

    def _blocks(self, request_id: str) -> set[int]:
        """The ids of the request's KV blocks, without the one that stands for blocks that are not needed."""
        nothing = self.kv_cache_manager.block_pool.null_block.block_id
        return {block for group in self.kv_cache_manager.get_block_ids(request_id) for block in group} - {nothing}


class SlotcarScheduler(_SlotcarScheduling):
    """Stands in for vLLM's Scheduler."""


class SlotcarAsyncScheduler(_SlotcarScheduling, AsyncScheduler):
    """Stands in for vLLM's AsyncScheduler."""


def _append_failure(outputs: dict[int, EngineCoreOutputs], request: Request, text: str) -> None:
    """The last output of a failed request; as vLLM has no field for the reason, it is the one for the stop."""
    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=failures.reason_text(text),
        # vLLM takes an output without this for one that has a detokenizer.
        pooling_output=torch.empty(0) if request.pooling_params is not None else None,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
    # vLLM's outputs without any of their own share one default list.
    found = outputs.setdefault(request.client_index, EngineCoreOutputs())
    found.outputs = [*found.outputs, output]
