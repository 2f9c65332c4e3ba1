"""A server with a model and two adapters, a session at it, and `serve` without its server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import slotcar_client
from slotcar_sidecar.config import Config

from tests.adapters import make_adapter, tiny_llama
from tests.server import SidecarProcess


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """`slotcar serve` ends after it has its settings, which are here."""
    seen: list[Config] = []
    from slotcar_sidecar import app

    async def run(config: Config, _output: object) -> None:
        seen.append(config)

    monkeypatch.setattr(app, "run", run)
    monkeypatch.setattr(app, "announce", lambda config: None)
    return seen


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    root = tmp_path_factory.mktemp("root")
    model = tiny_llama()
    model.save_pretrained(root / "model")
    for seed, name in enumerate(("sql", "[red]x")):
        make_adapter(root / name, model, seed=seed, r=4, target_modules=["q_proj"])
    folder = tmp_path_factory.mktemp("s")
    with SidecarProcess(folder, root, extra=("--base-model", str(root / "model"))) as sidecar:
        yield sidecar


@pytest.fixture
def engine(sidecar: SidecarProcess) -> Iterator[slotcar_client.Session]:
    """A session with a name that looks like markup, one mapping, a hold of a slot and one of bytes."""
    with slotcar_client.connect(sidecar.target) as client:
        client.load("sql", sidecar.root / "sql")
        client.load("red", sidecar.root / "[red]x", tier="host")
        with client.session("my [red]engine", reserved_slots=1) as session:
            session.set_mapping(["sql", slotcar_client.BASE])
            session.hold("sql", hold_id=9, seconds=90, slot=True)
            session.hold("red", hold_id=10)
            yield session
        client.unload("sql")
        client.unload("red")
