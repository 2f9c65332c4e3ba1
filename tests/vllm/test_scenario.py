"""vLLM issue 47724 in a real vLLM: adapters that others load while a batch decodes change none of its tokens.

There a runtime load evicted the slot of a running batch, whose requests went on with another adapter's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import slotcar_client
from slotcar_client import Client, SlotsExhausted

from tests.server import SidecarProcess
from tests.vllm.conftest import Models, StartEngine
from tests.vllm.stage import PROMPTS, Engine

DECODED = 24


class Churn:
    """Another client, which makes two other adapters resident in turn."""

    def __init__(self, client: Client, adapters: Path) -> None:
        self._client = client
        self._adapters = adapters
        self.loaded = self.refused = 0

    def turn(self) -> None:
        name = ("french", "chat-2")[(self.loaded + self.refused) % 2]
        try:
            self._client.load(name, self._adapters / name)
            self.loaded += 1
        except SlotsExhausted:
            self.refused += 1


def decode(
    engines: list[Engine], versions: list[str], after_step: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """The tokens of one request for each version on each engine, which take their steps in turn."""
    requests = [
        (engine, engine.add(prompt, version, DECODED))
        for engine in engines
        for prompt, version in zip(PROMPTS, versions, strict=False)
    ]
    while any(engine.llm.llm_engine.has_unfinished_requests() for engine in engines):
        for engine in engines:
            if engine.llm.llm_engine.has_unfinished_requests():
                engine.step()
        after_step()
    return [engine.tokens[request] for engine, request in requests]


def phases(engines: list[Engine], client: Client, adapters: Path) -> Churn:
    """Reference, reference again, and churn, token for token."""
    versions = [f"{name}@{client.load(name, adapters / name, tier='host').digest}" for name in ("sql", "chat")]
    reference = decode(engines, versions)
    assert decode(engines, versions) == reference
    churn = Churn(client, adapters)
    assert decode(engines, versions, churn.turn) == reference
    assert churn.loaded + churn.refused >= DECODED
    half = len(reference) // len(engines)
    assert reference[:half] * len(engines) == reference, "engines that share adapters compute the same"
    return churn


@pytest.mark.parametrize(("slots", "evicts"), [(3, True), pytest.param(2, False, marks=pytest.mark.full)])
def test_churn_changes_no_token(
    slots: int, evicts: bool, models: Models, slotcar_engine: StartEngine, tmp_path: Path
) -> None:
    folder = models["llama"]
    with (
        SidecarProcess(tmp_path, folder / "adapters", slots=slots) as sidecar,
        slotcar_engine(folder, sidecar) as engine,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
    ):
        churn = phases([engine], client, folder / "adapters")
        assert bool(churn.loaded) is evicts
        assert bool(churn.refused) is not evicts


@pytest.mark.full
@pytest.mark.parametrize(("slots", "evicts"), [(3, True), (2, False)])
def test_churn_changes_no_token_of_two_engines_that_share_the_slots(
    slots: int, evicts: bool, models: Models, slotcar_engine: StartEngine, tmp_path: Path
) -> None:
    folder = models["llama"]
    with (
        SidecarProcess(tmp_path, folder / "adapters", slots=slots) as sidecar,
        slotcar_engine(folder, sidecar) as first,
        slotcar_engine(folder, sidecar) as second,
        slotcar_client.connect(sidecar.target, timeout_seconds=60) as client,
    ):
        churn = phases([first, second], client, folder / "adapters")
        assert bool(churn.loaded) is evicts
        pinned = {slot for session in client.sessions() for mapping in session.mappings for slot in mapping.slots}
        assert len(pinned) == 2, "both engines use the same two slots"
