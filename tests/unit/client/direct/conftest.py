"""A writer of slots with two adapters, and the transport of a client that mapped them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slotcar_client.transports.direct import DirectTransport
from slotcar_kernels import native

from tests.unit.client.direct.calls import connected
from tests.unit.client.direct.slots_writer import A, B, SlotsWriter


@pytest.fixture
def writer() -> SlotsWriter:
    """A is in slot 0, B in slot 1, nothing in slot 2."""
    writer = SlotsWriter()
    writer.load(0, A)
    writer.load(1, B)
    return writer


@pytest.fixture
def transport(writer: SlotsWriter) -> Iterator[DirectTransport]:
    transport = connected(writer)
    yield transport
    transport.close()


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in an installation that has none."""
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "_native.so")
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()
