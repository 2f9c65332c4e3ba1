"""Fixtures of the store's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from slotcar_sidecar.store.sources.local import LocalSource

from tests.adapters import MINIMAL_CONFIG, raw_tensors, write_raw_adapter

SITE = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads, and far slower where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one good adapter, `good`; beside it, outside, another, `secret`."""
    write_raw_adapter(tmp_path / "root" / "good", MINIMAL_CONFIG, raw_tensors(SITE))
    write_raw_adapter(tmp_path / "secret", MINIMAL_CONFIG, raw_tensors(SITE, seed=9))
    return tmp_path / "root"


@pytest.fixture
def source(root: Path) -> LocalSource:
    return LocalSource([root], max_bytes=1 << 20)
