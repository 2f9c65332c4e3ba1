"""When the sidecar, an adapter or a slot goes, requests go on or fail alone, and no token is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
from slotcar_client import Client, Unavailable
from slotcar_client.engines.vllm.opening import waited
from slotcar_client.engines.vllm.requests import version_request

from tests.server import SidecarProcess
from tests.vllm.conftest import Models, StartEngine
from tests.vllm.stage import PROMPTS, Engine, peft_tokens

DECODED = 16
NAMES = ("sql", "chat")


@dataclass
class Stage:
    """An engine, its sidecar, which may be killed and started again, and an operator."""

    folder: Path
    sidecar: SidecarProcess
    engine: Engine
    client: Client

    def load(self, name: str, source: str = "", **settings: Any) -> str:
        """The version that the name has now."""
        path = self.folder / "adapters" / (source or name)
        return f"{name}@{self.client.load(name, path, tier='host', replace=True, **settings).digest}"

    def wanted(self, name: str | None, prompt: int = 0, count: int = DECODED) -> list[int]:
        return peft_tokens("llama", self.folder, name, PROMPTS[prompt], count)

    def begun(self, *adapters: str | None, count: int = DECODED) -> list[str]:
        """Requests for these adapters, one for each prompt, each with some tokens already."""
        names = [self.engine.add(prompt, adapter, count) for prompt, adapter in zip(PROMPTS, adapters, strict=False)]
        self.engine.step_until(lambda: all(len(self.engine.tokens[name]) >= 3 for name in names))
        return names

    def reason(self, name: str) -> str:
        """Why the request failed."""
        output = self.engine.ended[name].outputs[0]
        assert output.finish_reason == "error"
        return str(output.stop_reason)

    def in_next_pass(self, happen: Callable[[], object]) -> None:
        """It happens between two layers of the engine's next step."""

        def hook(*_: object) -> None:
            handle.remove()
            happen()

        layer = self.engine.runner.model.get_submodule("model.layers.1.self_attn")
        handle = layer.register_forward_hook(hook)
        self.engine.step()

    def restart(self) -> None:
        self.sidecar.kill()
        self.sidecar = self.sidecar.again().start()


@pytest.fixture(scope="module")
def stages(models: Models, slotcar_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = models["llama"]
    sidecar = SidecarProcess(tmp_path_factory.mktemp("s"), folder / "adapters", slots=2).start()
    with (
        slotcar_engine(folder, sidecar) as engine,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
    ):
        stage = Stage(folder, sidecar, engine, client)
        yield stage
        stage.sidecar.stop()


@pytest.fixture
def stage(stages: Stage) -> Stage:
    for name in NAMES:
        stages.load(name)
    return stages


@pytest.mark.parametrize("between", ["steps", "layers"])
def test_requests_go_on_after_a_restart_in_mid_decode(stage: Stage, between: str) -> None:
    names = stage.begun(stage.load("sql"), None, stage.load("chat"))
    if between == "layers":
        stage.in_next_pass(stage.restart)
    else:
        stage.restart()
    stage.engine.finish()
    for index, (name, adapter) in enumerate(zip(names, ("sql", None, "chat"), strict=True)):
        assert stage.engine.tokens[name] == stage.wanted(adapter, index)


def test_a_restart_brings_an_old_version_back_for_its_requests_only(stage: Stage) -> None:
    [name] = stage.begun(stage.load("sql"))
    stage.load("sql", "sql-2")
    stage.restart()
    stage.engine.finish()
    assert stage.engine.tokens[name] == stage.wanted("sql")
    assert stage.client.list() == (), "whoever gave the name a version gives it again"


def test_a_request_whose_bytes_a_restart_lost_fails_alone(stage: Stage) -> None:
    adapters = stage.folder / "adapters"
    shutil.copytree(adapters / "french-2", adapters / "moving")
    names = stage.begun(stage.load("moving"), None, stage.load("chat"))
    shutil.copytree(adapters / "sql", adapters / "moving", dirs_exist_ok=True)
    stage.restart()
    stage.engine.finish()
    assert "DIGEST_MISMATCH" in stage.reason(names[0])
    assert stage.engine.tokens[names[0]] == stage.wanted("french-2")[: len(stage.engine.tokens[names[0]])]
    assert stage.engine.tokens[names[1]] == stage.wanted(None, 1)
    assert stage.engine.tokens[names[2]] == stage.wanted("chat", 2)


def test_a_replaced_adapter_serves_old_requests_with_old_weights(stage: Stage) -> None:
    old = stage.load("sql")
    [first] = stage.begun(old)
    new = stage.load("sql", "sql-2")
    assert new != old
    second = stage.engine.add(PROMPTS[0], new, DECODED)
    stage.engine.finish()
    assert stage.engine.tokens[first] == stage.wanted("sql")
    assert stage.engine.tokens[second] == stage.wanted("sql-2")


def test_an_unloaded_adapter_serves_the_requests_that_have_it(stage: Stage) -> None:
    [name] = stage.begun(stage.load("sql"))
    stage.client.unload("sql")
    stage.engine.finish()
    assert stage.engine.tokens[name] == stage.wanted("sql")


@pytest.mark.parametrize("between", ["steps", "layers"])
def test_a_forced_unload_fails_the_requests_of_its_adapter_only(stage: Stage, between: str) -> None:
    names = stage.begun(stage.load("sql"), None, stage.load("chat"))
    if between == "layers":
        stage.in_next_pass(lambda: stage.client.unload("sql", force=True))
    else:
        stage.client.unload("sql", force=True)
    stage.engine.finish()
    assert "ADAPTER_NOT_FOUND" in stage.reason(names[0])
    assert stage.engine.tokens[names[0]] == stage.wanted("sql")[: len(stage.engine.tokens[names[0]])]
    assert stage.engine.tokens[names[1]] == stage.wanted(None, 1)
    assert stage.engine.tokens[names[2]] == stage.wanted("chat", 2)


def test_an_adapter_that_is_not_there_fails_its_request_only(stage: Stage) -> None:
    digest = "sha256:" + "0" * 64
    names = [stage.engine.add(PROMPTS[0], f"nobody@{digest}"), stage.engine.add(PROMPTS[1], None, DECODED)]
    stage.engine.finish()
    assert "ADAPTER_NOT_FOUND" in stage.reason(names[0])
    assert stage.engine.tokens[names[0]] == []
    assert stage.engine.tokens[names[1]] == stage.wanted(None, 1)


def test_requests_take_turns_while_others_have_the_slots(stage: Stage) -> None:
    stage.load("french")
    with stage.client.session("another") as another:
        another.set_mapping(["french"], load=True)
        versions = [stage.load("sql"), stage.load("chat")]
        names = [stage.engine.add(prompt, version, 8) for prompt, version in zip(PROMPTS, versions, strict=False)]
        stage.engine.finish()
    for index, (name, adapter) in enumerate(zip(names, NAMES, strict=True)):
        assert stage.engine.tokens[name] == stage.wanted(adapter, index, 8)


def test_a_preempted_request_comes_back_to_the_weights_it_began_with(stage: Stage) -> None:
    old = stage.load("sql")
    [name] = stage.begun(old)
    stage.load("sql", "sql-2")
    assert stage.engine.llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache(reset_running_requests=True)
    stage.engine.finish()
    assert stage.engine.tokens[name] == stage.wanted("sql")


def test_a_pinned_adapter_is_kept_resident(stage: Stage) -> None:
    llm = stage.engine.llm.llm_engine
    request = version_request(stage.load("french"))
    assert llm.add_lora(request)
    assert request.lora_int_id in llm.list_loras()
    assert llm.pin_lora(request.lora_int_id)
    assert stage.client.get("french").keep
    assert llm.remove_lora(request.lora_int_id)
    stage.client.unload("french")
    with pytest.raises(RuntimeError, match="slotcar ADAPTER_NOT_FOUND"):
        llm.add_lora(request)


@pytest.mark.full
def test_a_lost_sidecar_fails_requests_at_once_where_that_is_asked_for(
    models: Models, slotcar_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models["llama"]
    monkeypatch.setenv("SLOTCAR_ON_LOSS", "fail")
    sidecar = SidecarProcess(tmp_path, folder / "adapters").start()
    with (
        slotcar_engine(folder, sidecar) as engine,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
    ):
        stage = Stage(folder, sidecar, engine, client)
        names = stage.begun(stage.load("sql"), None)
        sidecar.kill()
        engine.finish()
        assert "UNAVAILABLE" in stage.reason(names[0])
        assert engine.tokens[names[1]] == stage.wanted(None, 1)
        with sidecar.again():
            waited(engine.runner.lora_manager.steps.client.capacity, 60)  # its channel tries again only now and then
            assert engine.generate([(PROMPTS[0], stage.load("sql"))], DECODED) == [stage.wanted("sql")]


@pytest.mark.full
def test_an_engine_without_a_sidecar_says_so_at_its_start(
    models: Models, slotcar_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTCAR_WAIT_SECONDS", "0")
    nobody = SidecarProcess(tmp_path, tmp_path)
    with pytest.raises(Unavailable, match="the server was away"), slotcar_engine(models["llama"], nobody):
        pass
