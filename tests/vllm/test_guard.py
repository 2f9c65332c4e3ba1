"""A vLLM that differs where slotcar takes hold of it is refused at start, with what differs and what would fit."""

from __future__ import annotations

from typing import Any

import pytest
from slotcar_client.engines.vllm import plugin, versions
from slotcar_client.engines.vllm.versions import Hook
from slotcar_client.errors import VersionMismatch
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM

GROUPS = [versions.FRONT_HOOKS, versions.SCHEDULER_HOOKS, versions.WORKER_HOOKS]


@pytest.mark.parametrize("hooks", GROUPS, ids=["front", "scheduler", "worker"])
def test_the_vllm_that_is_tested_fits(hooks: tuple[Hook, ...]) -> None:
    versions.check(hooks)
    assert versions.installed_version() in versions.WORKS_WITH


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        (Hook("vllm.nowhere", "f", ()), "vllm.nowhere:f is missing"),
        (Hook("vllm.v1.engine.async_llm", "AsyncLLM.add_adapter", ()), "AsyncLLM.add_adapter is missing"),
        (Hook("vllm.v1.engine.async_llm", "logger", ()), "async_llm:logger cannot be called"),
        (
            Hook("vllm.v1.engine.async_llm", "AsyncLLM.add_lora", ("self", "name")),
            r"AsyncLLM.add_lora has the parameters \(self, lora_request\), wanted \(self, name\)",
        ),
    ],
)
def test_a_place_that_differs_is_named(hook: Hook, found: str) -> None:
    with pytest.raises(VersionMismatch, match=found) as caught:
        versions.check((versions.FRONT_HOOKS[0], hook))
    assert caught.value.metadata["wanted"] == ", ".join(versions.WORKS_WITH)
    assert str(versions.FRONT_HOOKS[0]) not in caught.value.message


async def _add_lora(self: Any, lora_request: Any, tier: str) -> bool:
    raise NotImplementedError


def _schedule(self: Any) -> Any:
    raise NotImplementedError


async def _load(self: Any, name: str, path: str) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("owner", "name", "changed"),
    [
        (AsyncLLM, "add_lora", _add_lora),
        (Scheduler, "schedule", _schedule),
        (OpenAIServingModels, "load_lora_adapter", _load),
    ],
)
def test_an_engine_is_not_made_by_a_vllm_that_changed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, changed: Any
) -> None:
    monkeypatch.setenv("SLOTCAR_TARGET", "unix:///nowhere/s.sock")
    monkeypatch.setattr(owner, name, changed)
    before = EngineArgs.create_engine_config
    with pytest.raises(VersionMismatch, match=rf"{owner.__name__}\.{name} .*"):
        plugin.register()
    assert EngineArgs.create_engine_config is before
    assert getattr(owner, name) is changed


def test_without_a_target_any_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLOTCAR_TARGET", raising=False)
    monkeypatch.setattr(AsyncLLM, "add_lora", _add_lora)
    plugin.register()


def test_a_scheduler_without_the_plug_in_is_guarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from slotcar_client.engines.vllm.scheduler import SlotcarScheduler

    monkeypatch.setattr(Scheduler, "schedule", _schedule)
    with pytest.raises(VersionMismatch, match=r"Scheduler\.schedule"):
        SlotcarScheduler()


def test_an_untested_version_that_fits_is_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.99.0")
    plugin._note_version()
    assert "vLLM 0.99.0 has every place that slotcar needs, but was never tested" in caplog.text
