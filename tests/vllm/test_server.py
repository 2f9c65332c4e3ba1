"""vLLM's OpenAI server: its models are the sidecar's adapters, whatever happens to them while it runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import slotcar_client
from slotcar_client import Client

from tests.server import SidecarProcess
from tests.vllm.openai_server import BASE, Server, refused, streamed, tokens
from tests.vllm.stage import PROMPTS, peft_tokens
from tests.waiting import eventually

PROMPT = PROMPTS[0]
LONG = list(range(40))


class Stage:
    """A server, its sidecar with sql in the first version and chat, and what PEFT says."""

    def __init__(self, server: Server, sidecar: SidecarProcess, client: Client, models: Path) -> None:
        self.server = server
        self.sidecar = sidecar
        self.client = client
        self.adapters = models / "adapters"
        self._models = models
        self._peft: dict[tuple[Any, ...], list[int]] = {}

    def peft(self, adapter: str | None, prompt: list[int] = PROMPT, count: int = 8) -> list[int]:
        key = (adapter, tuple(prompt), count)
        if key not in self._peft:
            self._peft[key] = peft_tokens("llama", self._models, adapter, prompt, count)
        return self._peft[key]

    def load(self, name: str, version: str | None = None) -> str:
        return self.client.load(name, self.adapters / (version or name), replace=True, tier="host").digest

    def ask(self, model: str, prompt: list[int] = PROMPT) -> list[int]:
        return tokens(self.server.complete(model, prompt))


@pytest.fixture(scope="module")
def running(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder, made = tmp_path_factory.mktemp("server"), models["llama"]
    with (
        SidecarProcess(folder, made, slots=3) as sidecar,
        Server(made / "model", folder, sidecar.target) as server,
        slotcar_client.connect(sidecar.target) as client,
    ):
        yield Stage(server, sidecar, client, made)


@pytest.fixture
def stage(running: Stage) -> Stage:
    for adapter in running.client.list():
        running.client.unload(adapter.name, force=True)
    for name in ("sql", "chat"):
        running.load(name)
    return running


def test_the_base_model_and_adapters_are_computed_as_peft_does(stage: Stage) -> None:
    found = {model: stage.ask(model) for model in (BASE, "sql", "chat")}
    assert found == {BASE: stage.peft(None), "sql": stage.peft("sql"), "chat": stage.peft("chat")}
    assert len({tuple(one) for one in found.values()}) == 3


def test_the_answer_has_the_model_as_it_was_asked_for(stage: Stage) -> None:
    version = f"sql@{stage.client.get('sql').digest}"
    for model in (BASE, "sql", version):
        answer = stage.server.complete(model, PROMPT)
        assert answer.json()["model"] == model
    assert tokens(answer) == stage.peft("sql")
    chat = stage.server.post("/v1/chat/completions", model="sql", messages=[{"role": "user", "content": "t7 t3"}])
    assert (chat.status_code, chat.json()["model"]) == (200, "sql")


@pytest.mark.parametrize("model", ["french", f"sql@sha256:{'0' * 64}", "../sql", "no such name"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_adapter_is_the_engines_404(stage: Stage, model: str, stream: bool) -> None:
    answer = stage.server.post("/v1/completions", model=model, prompt=PROMPT, stream=stream)
    status, message = refused(answer)
    assert (status, answer.json()["error"]["type"]) == (404, "NotFoundError")
    assert message.startswith(f"The model `{model}` does not exist.")


def test_the_models_are_the_sidecars_at_this_moment(stage: Stage) -> None:
    digest = stage.client.get("sql").digest
    cards = {card["id"]: card for card in stage.server.get("/v1/models").json()["data"]}
    assert list(cards) == [BASE, "chat", "sql"]
    assert (cards["sql"]["root"], cards["sql"]["parent"]) == (f"slotcar:sql@{digest}", BASE)
    stage.client.unload("sql")
    assert [card["id"] for card in stage.server.get("/v1/models").json()["data"]] == [BASE, "chat"]


def test_a_replaced_adapter_is_new_for_the_next_request(stage: Stage) -> None:
    assert stage.ask("sql", LONG) == stage.peft("sql", LONG)
    stage.load("sql", "sql-2")
    assert stage.ask("sql", LONG) == stage.peft("sql-2", LONG) != stage.peft("sql", LONG)
    stage.load("sql")
    assert stage.ask("sql", LONG) == stage.peft("sql", LONG)


def test_a_request_goes_on_with_the_version_that_it_began_with(stage: Stage) -> None:
    with stage.server.stream("sql", PROMPT, 200) as chunks:
        first = streamed(iter([next(chunks)]))
        stage.load("sql", "sql-2")
        assert stage.ask("sql") == stage.peft("sql-2")
        assert first + streamed(chunks) == stage.peft("sql", count=200)


def test_under_churn_every_answer_is_one_version_of_the_name(stage: Stage) -> None:
    """More versions than the workers hold beside those in use; each request gets the one that it was admitted with."""
    versions = ("sql", "sql-2", "french")
    possible = [stage.peft(version) for version in versions]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(stage.ask, "sql") for _ in range(60)]
        number = 0
        while not all(answer.done() for answer in answers):
            number += 1
            stage.load("sql", versions[number % 3])
    found = [answer.result() for answer in answers]
    assert all(one in possible for one in found)
    assert {tuple(one) for one in found} == {tuple(one) for one in possible}


def test_an_unloaded_adapter_is_unknown_to_new_requests_alone(stage: Stage) -> None:
    with stage.server.stream("sql", PROMPT, 200) as chunks:
        first = streamed(iter([next(chunks)]))
        stage.client.unload("sql")
        assert refused(stage.server.complete("sql", PROMPT))[0] == 404
        assert first + streamed(chunks) == stage.peft("sql", count=200)


def test_an_adapter_that_is_taken_away_ends_its_request_with_the_reason(stage: Stage) -> None:
    with stage.server.stream("sql", PROMPT, 400) as chunks:
        next(chunks)
        stage.client.unload("sql", force=True)
        *_, last = chunks
    assert last["error"]["code"] == 404
    assert re.match(r"slotcar ADAPTER_NOT_FOUND: .*sql", last["error"]["message"])
    assert stage.ask("chat") == stage.peft("chat")
    stage.load("sql")
    assert stage.ask("sql") == stage.peft("sql")


# The routes


def test_load_and_unload_are_the_sidecars(stage: Stage) -> None:
    french = {"lora_name": "french", "lora_path": str(stage.adapters / "french")}
    for _ in range(2):
        answer = stage.server.post("/v1/load_lora_adapter", **french)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'french' added successfully.")
    assert stage.client.get("french").source.endswith("/french")
    assert stage.ask("french") == stage.peft("french")
    answer = stage.server.post("/v1/unload_lora_adapter", lora_name="french")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'french' removed successfully.")
    assert "french" not in [adapter.name for adapter in stage.client.list()]
    assert refused(stage.server.complete("french", PROMPT))[0] == 404
    assert refused(stage.server.post("/v1/unload_lora_adapter", lora_name="french"))[0] == 404


def test_other_bytes_need_load_inplace(stage: Stage) -> None:
    second = {"lora_name": "sql", "lora_path": str(stage.adapters / "sql-2")}
    status, message = refused(stage.server.post("/v1/load_lora_adapter", **second))
    assert (status, message.startswith("slotcar ADAPTER_CONFLICT: ")) == (409, True)
    assert stage.ask("sql") == stage.peft("sql")
    assert stage.server.post("/v1/load_lora_adapter", **second, load_inplace=True).status_code == 200
    assert stage.ask("sql") == stage.peft("sql-2")


def test_what_the_sidecar_has_can_be_asked_for(stage: Stage) -> None:
    for path in ("slotcar:", "slotcar:sql", f"slotcar:sql@{stage.client.get('sql').digest}"):
        assert stage.server.post("/v1/load_lora_adapter", lora_name="sql", lora_path=path).status_code == 200
    assert refused(stage.server.post("/v1/load_lora_adapter", lora_name="x", lora_path="slotcar:x"))[0] == 404


@pytest.mark.parametrize(
    ("name", "path", "status", "message"),
    [
        ("x", "/etc", 403, "slotcar SOURCE_DENIED: "),
        ("x", "{adapters}/broken", 400, "slotcar ADAPTER_INVALID: "),
        ("x y", "{adapters}/sql", 400, "slotcar REQUEST_INVALID: "),
        (f"sql@sha256:{'0' * 64}", "{adapters}/sql", 400, "slotcar REQUEST_INVALID: "),
        ("", "{adapters}/sql", 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (BASE, "{adapters}/sql", 400, "The lora adapter 'base' conflicts with a served base model."),
    ],
)
def test_a_load_that_fails_says_why(stage: Stage, name: str, path: str, status: int, message: str) -> None:
    broken = stage.adapters / "broken"
    if not broken.exists():
        shutil.copytree(stage.adapters / "sql", broken)
        (broken / "adapter_config.json").write_text("{", encoding="utf-8")
    path = path.format(adapters=stage.adapters)
    found = refused(stage.server.post("/v1/load_lora_adapter", lora_name=name, lora_path=path))
    assert (found[0], found[1][: len(message)]) == (status, message)


def test_the_metrics_have_plain_names(stage: Stage) -> None:
    with stage.server.stream("sql", PROMPT, 200) as chunks:
        next(chunks)
        next(chunks)
        found = stage.server.get("/metrics").text
        streamed(chunks)
    assert 'running_lora_adapters="sql"' in found


# Last, as it starts the sidecar anew


def test_while_the_sidecar_is_away_the_base_model_is_served_alone(stage: Stage) -> None:
    stage.sidecar.kill()
    assert stage.ask(BASE) == stage.peft(None)
    for stream in (False, True):
        answer = stage.server.post("/v1/completions", model="sql", prompt=PROMPT, stream=stream)
        status, message = refused(answer)
        assert (status, message.startswith("slotcar UNAVAILABLE: ")) == (503, True)
    assert [card["id"] for card in stage.server.get("/v1/models").json()["data"]] == [BASE]
    stage.sidecar.start()
    stage.load("sql", "sql-2")
    # A channel whose server was away tries again after a second at most.
    eventually(lambda: stage.server.complete("sql", PROMPT).status_code == httpx.codes.OK, "an answer")
    assert stage.ask("sql") == stage.peft("sql-2")


# Other ways to start


@pytest.mark.full
def test_several_servers_of_one_engine_know_one_adapter(models: Any, tmp_path: Path) -> None:
    made = models["llama"]
    modules = ("--lora-modules", f"sql={made / 'adapters' / 'sql'}", "chat=slotcar:", "--api-server-count", "2")
    with SidecarProcess(tmp_path, made, slots=3) as sidecar, slotcar_client.connect(sidecar.target) as client:
        client.load("chat", made / "adapters" / "chat", tier="host")
        with Server(made / "model", tmp_path, sidecar.target, modules) as server:
            stage = Stage(server, sidecar, client, made)
            for _ in range(8):
                assert [stage.ask(model) for model in ("sql", "chat")] == [stage.peft("sql"), stage.peft("chat")]
            stage.load("sql", "sql-2")
            for _ in range(8):
                assert stage.ask("sql") == stage.peft("sql-2")
            client.unload("sql")
            assert {refused(server.complete("sql", PROMPT))[0] for _ in range(8)} == {404}


@pytest.mark.full
def test_a_module_that_cannot_be_had_ends_the_start(models: Any, tmp_path: Path) -> None:
    made = models["llama"]
    with SidecarProcess(tmp_path, made, slots=3) as sidecar:
        server = Server(made / "model", tmp_path, sidecar.target, ("--lora-modules", "sql=slotcar:sql")).start()
        assert server.ended() != 0
    assert "slotcar ADAPTER_NOT_FOUND: " in server.log
