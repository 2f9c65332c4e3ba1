"""The plug-in: what an engine's configuration becomes, and what the front end does to requests and their failures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
from slotcar_client.engines.vllm import front, plugin
from slotcar_client.engines.vllm.calls import Calls
from slotcar_client.engines.vllm.requests import Asked, asked_by, engine_id, version_request
from slotcar_client.engines.vllm.resolver import SlotcarResolver
from slotcar_client.errors import AdapterNotFound, RequestInvalid, SlotsExhausted, Unavailable
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolverRegistry
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from tests.adapters import make_adapter, tiny_llama
from tests.server import SidecarProcess
from tests.vllm.plugged import plugged

A = "sha256:" + "a" * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, with the adapter sql beside it."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder / "llama")
    make_adapter(folder / "sql", tiny_llama())
    return folder


@pytest.fixture(autouse=True)
def _plugged() -> Iterator[None]:
    with plugged("unix:///nowhere/s.sock"):
        yield


def arguments(folder: Path, **settings: Any) -> EngineArgs:
    settings = {"dtype": "float32", "max_model_len": 128, "enable_lora": True} | settings
    return EngineArgs(model=str(folder / "llama"), skip_tokenizer_init=True, **settings)


# The configuration


def test_an_engine_with_lora_gets_our_worker_and_scheduler(folder: Path) -> None:
    config = arguments(folder).create_engine_config()
    assert config.parallel_config.worker_cls == "slotcar_client.engines.vllm.worker.SlotcarCPUWorker"
    assert config.scheduler_config.scheduler_cls == "slotcar_client.engines.vllm.scheduler.SlotcarScheduler"
    assert config.scheduler_config.get_scheduler_cls().__name__ == "SlotcarScheduler"


def test_an_engine_without_lora_is_vllms_own(folder: Path) -> None:
    config = arguments(folder, enable_lora=False).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.scheduler_config.scheduler_cls is None


def test_what_the_user_chose_stays(folder: Path) -> None:
    own = "vllm.v1.worker.cpu_worker.CPUWorker"
    config = arguments(folder, worker_cls=own).create_engine_config()
    assert (config.parallel_config.worker_cls, config.scheduler_config.scheduler_cls) == (own, None)
    scheduler = "vllm.v1.core.sched.scheduler.Scheduler"
    config = arguments(folder, scheduler_cls=scheduler).create_engine_config()
    assert config.scheduler_config.scheduler_cls == scheduler
    assert config.parallel_config.worker_cls.endswith(".SlotcarCPUWorker")


def test_a_platform_whose_worker_is_not_known_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(plugin.WORKERS, "vllm.v1.worker.cpu_worker.CPUWorker")
    with pytest.raises(RequestInvalid, match=r"worker_cls is vllm\.v1\.worker\.cpu_worker\.CPUWorker"):
        arguments(folder).create_engine_config()


def test_registering_again_changes_nothing() -> None:
    before = (EngineArgs.create_engine_config, AsyncLLM.add_request, OutputProcessor.process_outputs)
    resolver = LoRAResolverRegistry.get_resolver("slotcar")
    plugin.register()
    assert (EngineArgs.create_engine_config, AsyncLLM.add_request, OutputProcessor.process_outputs) == before
    assert LoRAResolverRegistry.get_resolver("slotcar") is resolver


PROBE = """
import os, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
assert "slotcar_client.engines.vllm.front" not in sys.modules, "a process without engines was touched"
from vllm.engine.arg_utils import EngineArgs
from slotcar_client.engines.vllm import plugin
plugin.register()
print("slotcar_client.engines.vllm.front" in sys.modules, hasattr(EngineArgs.create_engine_config, "_slotcar"))
"""


@pytest.mark.parametrize(("target", "found"), [("", "False False"), ("unix:///nowhere/s.sock", "True True")])
def test_only_a_process_that_makes_engines_and_has_a_target_is_touched(
    monkeypatch: pytest.MonkeyPatch, target: str, found: str
) -> None:
    monkeypatch.setenv("SLOTCAR_TARGET", target)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.stdout.strip().splitlines()[-1:] == [found], done.stderr


# The resolver


async def test_the_resolver_finds_what_the_sidecar_has(folder: Path, tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, folder) as sidecar, slotcar_client.connect(sidecar.target) as client:
        digest = client.load("sql", folder / "sql", tier="host").digest
        resolver = SlotcarResolver(Calls(sidecar.target))
        for name in ("sql", f"sql@{digest}"):
            found = await resolver.resolve_lora("base", name)
            assert found is not None
            assert found.lora_name == name
            assert asked_by(found) == Asked(f"sql@{digest}", by_name=name == "sql")
            assert found.lora_int_id == engine_id(f"sql@{digest}")
        for name in ("chat", f"sql@{A}", "", "../sql", "no adapter can be called so"):
            assert await resolver.resolve_lora("base", name) is None


async def test_an_adapter_is_not_unknown_because_the_sidecar_is_away(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await SlotcarResolver(Calls(f"unix://{tmp_path}/s.sock")).resolve_lora("base", "sql")


# Outputs


def core_request(name: str, lora: LoRARequest | None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=name,
    )


def ended(name: str, reason: str | None) -> EngineCoreOutput:
    return EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason=reason)


@pytest.fixture
def processor() -> OutputProcessor:
    return OutputProcessor(tokenizer=None, log_stats=False)


@pytest.mark.parametrize(
    ("text", "status"),
    [("ADAPTER_NOT_FOUND: sql is gone", 404), ("SLOTS_EXHAUSTED: 2 of 2 are pinned", 503), ("INTERNAL: a bug", 500)],
)
async def test_who_awaits_a_failed_request_gets_the_reason(processor: OutputProcessor, text: str, status: int) -> None:
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "1")
    processor.add_request(core_request("1", version_request(f"sql@{A}")), None, queue=queue)
    processor.process_outputs([ended("1", f"slotcar {text}")])
    with pytest.raises(front.AdapterRefused) as caught:
        await queue.get()
    assert (caught.value.message, caught.value.http_status) == (f"slotcar {text}", status)
    assert not processor.has_unfinished_requests()


async def test_other_failures_stay_vllms(processor: OutputProcessor) -> None:
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "1")
    processor.add_request(core_request("1", None), None, queue=queue)
    processor.process_outputs([ended("1", None), ended("unknown", "slotcar INTERNAL: x")])
    assert (await queue.get()).outputs[0].finish_reason == "error"


def test_a_synchronous_engines_output_has_the_reason(processor: OutputProcessor) -> None:
    processor.add_request(core_request("1", version_request(f"sql@{A}")), None)
    (output,) = processor.process_outputs([ended("1", "slotcar ADAPTER_NOT_FOUND: x")]).request_outputs
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
    assert output.outputs[0].stop_reason == "slotcar ADAPTER_NOT_FOUND: x"


def test_metrics_count_by_name(processor: OutputProcessor) -> None:
    requests = {"1": version_request(f"sql@{A}"), "2": LoRARequest("other@x", 1, "/other"), "3": None}
    for name, lora in requests.items():
        processor.add_request(core_request(name, lora), None)
    assert [processor.request_states[name].lora_name for name in requests] == ["sql", "other@x", None]


@pytest.mark.parametrize(
    ("error", "status"), [(AdapterNotFound("x"), 404), (SlotsExhausted("x"), 503), (RuntimeError("slotcar A: x"), 500)]
)
def test_a_refusal_has_the_status_of_its_reason(error: Exception, status: int) -> None:
    found = front.refusal(error)
    assert isinstance(found, front.AdapterRefused)
    assert found.http_status == status


def test_a_failure_of_vllms_own_is_not_a_refusal() -> None:
    error = ValueError("too long")
    assert front.refusal(error) is error
