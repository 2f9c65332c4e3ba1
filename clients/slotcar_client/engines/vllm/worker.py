"""vLLM workers whose adapters are the sidecar's: `--worker-cls slotcar_client.engines.vllm.worker.SlotcarCPUWorker`.

Nothing of vLLM is patched. In an engine of one process the worker also chooses the scheduler, which is made after it;
one of several processes is told `--scheduler-cls` too, or has the plug-in.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from slotcar_client.engines.vllm import versions
from slotcar_client.engines.vllm.plugin import choose_scheduler
from slotcar_client.engines.vllm.runner import LoRARunner
from slotcar_client.errors import RequestInvalid


class _SlotcarWorker(Worker):
    """What each kind of worker gets; in the order of resolution it comes before vLLM's own."""

    _lora: LoRARunner | None = None

    def init_device(self) -> None:
        """Raises VersionMismatch or RequestInvalid when slotcar does not fit this engine."""
        if self.vllm_config.lora_config is None:
            super().init_device()
            return
        versions.check(versions.WORKER_HOOKS)
        check_config(self.vllm_config)
        super().init_device()
        self._lora = LoRARunner(self.model_runner, self.vllm_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if self._lora is None:
            return super().execute_model(scheduler_output)
        self._lora.begin(scheduler_output)
        return self._lora.end(super().execute_model(scheduler_output))

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        output = super().sample_tokens(grammar_output)
        return output if self._lora is None else self._lora.end(output)

    def shutdown(self) -> None:
        super().shutdown()
        if self._lora is not None:
            self._lora.close()


class SlotcarCPUWorker(_SlotcarWorker, CPUWorker):
    """vLLM's CPU worker with the sidecar's adapters."""


class SlotcarGPUWorker(_SlotcarWorker):
    """Refused: the sidecar has its slots in host memory."""

    def init_device(self) -> None:
        raise RequestInvalid(
            "slotcar serves vLLM on CPUs only as yet: start this engine without SLOTCAR_TARGET",
            field="worker_cls",
            found="GPU",
            wanted="CPU",
        )


def check_config(vllm_config: VllmConfig) -> None:
    """Raises RequestInvalid for an engine that slotcar cannot serve. In one process, sets the scheduler too."""
    config, parallel = vllm_config.lora_config, vllm_config.parallel_config
    assert config is not None
    for field, found, wanted in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("fully_sharded_loras", config.fully_sharded_loras, False),
        ("use_v2_model_runner", vllm_config.use_v2_model_runner, False),
    ):
        if found != wanted:
            raise RequestInvalid(f"{field} is {found}, slotcar needs {wanted}", field=field, found=found, wanted=wanted)
    choose_scheduler(vllm_config.scheduler_config)
