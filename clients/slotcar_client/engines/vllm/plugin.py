"""vLLM's general plug-in: with SLOTCAR_TARGET set, an engine with LoRA computes it with slotcar, by itself.

vLLM calls `register` in each of its processes, before it makes an engine. Only a process that makes engines needs it:
workers are slotcar's by the configuration that they get, and a process without slotcar's target is left alone.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from slotcar_client.config import chosen_target
from slotcar_client.engines.vllm import versions
from slotcar_client.engines.vllm.hooks import Method, wrap
from slotcar_client.errors import RequestInvalid

_log = logging.getLogger(__name__)
_PACKAGE = "slotcar_client.engines.vllm"
_RESOLVER = "slotcar"
# vLLM's worker → the one that stands in for it.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": f"{_PACKAGE}.worker.SlotcarCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": f"{_PACKAGE}.worker.SlotcarGPUWorker",
}
# By whether vLLM schedules asynchronously.
SCHEDULERS = {
    False: f"{_PACKAGE}.scheduler.SlotcarScheduler",
    True: f"{_PACKAGE}.scheduler.SlotcarAsyncScheduler",
}


def register() -> None:
    """Prepares this process to make engines. Idempotent. Raises VersionMismatch for a vLLM that does not fit."""
    target = chosen_target()
    if not target or "vllm.engine.arg_utils" not in sys.modules:
        return
    versions.check((*versions.FRONT_HOOKS, *versions.SCHEDULER_HOOKS))
    _note_version()

    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.resolver import LoRAResolverRegistry

    from slotcar_client.engines.vllm import front, routes
    from slotcar_client.engines.vllm.calls import Calls
    from slotcar_client.engines.vllm.resolver import SlotcarResolver

    calls = Calls(target)
    engines = front.Front(calls)
    wrap(EngineArgs, "create_engine_config", _create_engine_config)
    front.install(engines)
    routes.install(engines)
    if _RESOLVER not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(_RESOLVER, SlotcarResolver(calls))


def _note_version() -> None:
    found = versions.installed_version()
    if found not in versions.WORKS_WITH:
        works = ", ".join(versions.WORKS_WITH)
        _log.warning("vLLM %s has every place that slotcar needs, but was never tested with it; %s was", found, works)


def _create_engine_config(original: Method) -> Method:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        if config.lora_config is not None:
            _choose_worker(self, config)
        return config

    return create_engine_config


def _choose_worker(arguments: Any, config: Any) -> None:
    """The engine's worker and scheduler become slotcar's, each unless the user chose one of his own.

    Raises RequestInvalid for a platform whose worker slotcar cannot stand in for.
    """
    if arguments.worker_cls != "auto":
        return
    chosen = config.parallel_config.worker_cls
    if chosen not in WORKERS:
        known = " or ".join(WORKERS)
        raise RequestInvalid(
            f"worker_cls is {chosen} on this platform, slotcar stands in for {known}",
            field="worker_cls",
            found=chosen,
            wanted=known,
        )
    config.parallel_config.worker_cls = WORKERS[chosen]
    choose_scheduler(config.scheduler_config)


def choose_scheduler(scheduling: Any) -> None:
    """slotcar's, unless the user chose one of his own. `scheduling`: vLLM's SchedulerConfig."""
    if scheduling.scheduler_cls is None:
        scheduling.scheduler_cls = SCHEDULERS[bool(scheduling.async_scheduling)]
