"""A vLLM served by slotcar computes what PEFT and vLLM's own LoRA compute, and base rows keep their bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import slotcar_client
from slotcar_client import Client

from tests.server import SidecarProcess
from tests.vllm.conftest import Models, StartEngine
from tests.vllm.stage import ADAPTERS, PROMPTS, Engine, engine, own_lora, peft_tokens

TOLERANCE = 1e-4  # of a logprob, between two orders of summation in float32


@dataclass
class Served:
    """An engine of one kind of model, and the sidecar that has its adapters."""

    kind: str
    folder: Path
    client: Client
    engine: Engine

    @property
    def names(self) -> list[str]:
        return [name for name in ADAPTERS if (self.folder / "adapters" / name).exists()]

    def version(self, name: str) -> str:
        return f"{name}@{self.client.get(name).digest}"

    def mixed(self) -> list[tuple[list[int], str | None]]:
        """A request for each adapter with one of the base model between, and the first once more."""
        first, *others = map(self.version, self.names)
        return list(zip(PROMPTS, [first, None, *others, first], strict=False))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def served(
    request: pytest.FixtureRequest,
    models: Models,
    slotcar_engine: StartEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = models[request.param]
    with (
        SidecarProcess(tmp_path_factory.mktemp("s"), folder / "adapters", slots=4) as sidecar,
        slotcar_engine(folder, sidecar, max_loras=4) as engine,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
    ):
        stage = Served(request.param, folder, client, engine)
        for name in stage.names:
            client.load(name, folder / "adapters" / name, tier="host")
        yield stage


def test_tokens_are_pefts(served: Served) -> None:
    requests = served.mixed()
    found = served.engine.generate(requests)
    for (prompt, version), tokens in zip(requests, found, strict=True):
        name = version.partition("@")[0] if version else None
        assert tokens == peft_tokens(served.kind, served.folder, name, prompt, len(tokens)), name


def test_base_rows_keep_their_bits(served: Served) -> None:
    requests = served.mixed()
    base = [index for index, (_, version) in enumerate(requests) if version is None]
    mixed = served.engine.logprobs(requests)
    plain = served.engine.logprobs([(prompt, None) for prompt, _ in requests])
    assert base
    for index in base:
        assert mixed[index] == plain[index]
    assert mixed[0] != plain[0], "the adapter changes something"


def test_every_adapter_alone_and_again_in_a_mixed_batch(served: Served) -> None:
    requests = [request for request in served.mixed() if request[1]]
    alone = [served.engine.generate([request])[0] for request in requests]
    assert served.engine.generate(requests) == alone


def test_slots_are_in_shared_memory_and_the_engine_has_no_weights(served: Served) -> None:
    manager = served.engine.runner.lora_manager
    assert manager.steps._session.transport == "direct"
    stacked = [module.lora_a_stacked for module in manager._adapter_manager.modules.values()]
    assert stacked
    assert all(type(layer).__name__ == "Layer" for layer in stacked)


@pytest.mark.full
@pytest.mark.parametrize("plane", ["ring", "stream"])
def test_the_other_planes_compute_the_same(
    plane: str, models: Models, slotcar_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models["llama"]
    monkeypatch.setenv("SLOTCAR_PLANE", plane)
    with (
        SidecarProcess(tmp_path, folder / "adapters", slots=4) as sidecar,
        slotcar_engine(folder, sidecar, max_loras=4) as engine,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
    ):
        versions = [f"{name}@{client.load(name, folder / 'adapters' / name).digest}" for name in ADAPTERS]
        found = engine.generate(list(zip(PROMPTS, versions, strict=False)))
        [session] = client.sessions()
        assert session.planes == (("ring",) if plane == "ring" else ())
    for name, prompt, tokens in zip(ADAPTERS, PROMPTS, found, strict=False):
        assert tokens == peft_tokens("llama", folder, name, prompt, len(tokens)), name


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logprobs_are_those_of_vllms_own_lora(
    kind: str, models: Models, slotcar_engine: StartEngine, tmp_path: Path
) -> None:
    folder = models[kind]
    names = ["sql", None, "chat", "french", "sql"]
    # With as many slots as adapters vLLM gives base rows the last one's (index −1): it needs one more.
    with engine(folder / "model", max_loras=4) as own:
        loras = {name: own_lora(folder, name, number) for number, name in enumerate(("sql", "chat", "french"), 1)}
        wanted = own.logprobs([(prompt, loras.get(name or "")) for prompt, name in zip(PROMPTS, names, strict=True)])
    with (
        SidecarProcess(tmp_path, folder / "adapters", slots=3) as sidecar,
        slotcar_engine(folder, sidecar, max_loras=3) as ours,
    ):
        found = ours.logprobs([(prompt, loras.get(name or "")) for prompt, name in zip(PROMPTS, names, strict=True)])
    for theirs, mine in zip(wanted, found, strict=True):
        for one, other in zip(theirs, mine, strict=True):
            shared = one.keys() & other.keys()
            assert len(shared) > 15
            assert {token: other[token] for token in shared} == pytest.approx(
                {token: one[token] for token in shared}, abs=TOLERANCE
            )
