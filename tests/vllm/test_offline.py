"""vLLM's synchronous engine with the plug-in: LoRARequests as any program of vLLM's makes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
from slotcar_client import Client
from slotcar_client.engines.vllm.requests import engine_id
from slotcar_client.errors import AdapterConflict, AdapterNotFound
from vllm.lora.request import LoRARequest

from tests.server import SidecarProcess
from tests.vllm.plugged import plugged
from tests.vllm.stage import PROMPTS, Engine, engine, peft_tokens

PROMPT = PROMPTS[0]


class Stage:
    """An engine with the plug-in, and an operator of its sidecar."""

    def __init__(self, made: Engine, client: Client, models: Path) -> None:
        self.engine = made
        self.client = client
        self.adapters = models / "adapters"
        self._models = models

    def peft(self, adapter: str) -> list[int]:
        return peft_tokens("llama", self._models, adapter, PROMPT, 8)

    def tokens(self, request: LoRARequest) -> list[int]:
        (found,) = self.engine.generate([(PROMPT, request)])
        return found


@pytest.fixture(scope="module")
def running(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = models["llama"]
    with (
        SidecarProcess(tmp_path_factory.mktemp("offline"), made, slots=3) as sidecar,
        plugged(sidecar.target),
        slotcar_client.connect(sidecar.target) as client,
        engine(made / "model") as vllm,
    ):
        yield Stage(vllm, client, made)


@pytest.fixture
def stage(running: Stage) -> Stage:
    for adapter in running.client.list():
        running.client.unload(adapter.name, force=True)
    running.client.load("sql", running.adapters / "sql", tier="host")
    return running


def test_a_name_of_the_sidecar_is_its_version_of_the_moment(stage: Stage) -> None:
    request = LoRARequest("sql", 1, "slotcar:sql")
    assert stage.tokens(request) == stage.peft("sql")
    stage.client.load("sql", stage.adapters / "sql-2", replace=True, tier="host")
    assert stage.tokens(request) == stage.peft("sql-2")


def test_one_batch_can_have_two_versions_of_a_name(stage: Stage) -> None:
    request = LoRARequest("sql", 1, "slotcar:sql")
    first = stage.engine.add(PROMPT, request)
    stage.client.load("sql", stage.adapters / "sql-2", replace=True, tier="host")
    second = stage.engine.add(PROMPT, request)
    stage.engine.finish()
    assert stage.engine.tokens[first] == stage.peft("sql")
    assert stage.engine.tokens[second] == stage.peft("sql-2")


def test_a_folder_is_loaded_by_the_sidecar(stage: Stage) -> None:
    request = LoRARequest("french", 7, str(stage.adapters / "french"))
    for _ in range(2):
        assert stage.tokens(request) == stage.peft("french")
    assert stage.client.get("french").source.endswith("/french")


def test_other_bytes_under_a_name_need_load_inplace(stage: Stage) -> None:
    other = str(stage.adapters / "sql-2")
    with pytest.raises(AdapterConflict):
        stage.tokens(LoRARequest("sql", 1, other))
    assert stage.tokens(LoRARequest("sql", 1, other, load_inplace=True)) == stage.peft("sql-2")


def test_an_unknown_adapter_fails_its_request_alone(stage: Stage) -> None:
    good = stage.engine.add(PROMPT, LoRARequest("sql", 1, "slotcar:sql"))
    with pytest.raises(AdapterNotFound):
        stage.engine.add(PROMPT, LoRARequest("german", 2, "slotcar:german"))
    stage.engine.finish()
    assert stage.engine.tokens[good] == stage.peft("sql")


def test_add_pin_list_and_remove_are_the_sidecars_words(stage: Stage) -> None:
    vllm = stage.engine.llm.llm_engine
    number = engine_id(f"sql@{stage.client.get('sql').digest}")
    assert vllm.add_lora(LoRARequest("sql", 5, "slotcar:sql"))
    assert number in vllm.list_loras()
    assert stage.tokens(LoRARequest("sql", 5, "slotcar:sql")) == stage.peft("sql")
    assert vllm.pin_lora(5)
    assert stage.client.get("sql").keep
    assert vllm.remove_lora(5)
    assert number not in vllm.list_loras()
    assert stage.client.get("sql").keep
    stage.client.release_keep("sql")
    assert stage.tokens(LoRARequest("sql", 5, "slotcar:sql")) == stage.peft("sql")
