"""Fixtures of real vLLM engines; those of other suites are in tests/conftest.py.

`models[kind]` is a folder with a model and its adapters. `slotcar_engine(folder, sidecar)` is a context with an engine
whose adapters are the sidecar's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",  # what these engines get of slotcar they get by name
    }
)

import pytest

from tests.server import SidecarProcess
from tests.vllm.stage import WORKER, Engine, engine, save

StartEngine = Callable[..., AbstractContextManager[Engine]]


class Models:
    """Each kind of model is made when it is asked for, once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._folders: dict[str, Path] = {}

    def __getitem__(self, kind: str) -> Path:
        if kind not in self._folders:
            self._folders[kind] = save(kind, self._factory.mktemp(kind))
        return self._folders[kind]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory)


@pytest.fixture(scope="module")
def slotcar_engine() -> StartEngine:
    """slotcar_engine(folder, sidecar, **settings of vLLM): a context."""

    def start(folder: Path, sidecar: SidecarProcess, **settings: Any) -> AbstractContextManager[Engine]:
        os.environ["SLOTCAR_TARGET"] = sidecar.target
        return engine(folder / "model", worker_cls=WORKER, **settings)

    return start


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sets of the environment is gone after it."""
    for name in [name for name in os.environ if name.startswith("SLOTCAR_")]:
        monkeypatch.delenv(name)
