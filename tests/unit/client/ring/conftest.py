"""A sidecar that does as it is told, and sessions on its ring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import slotcar_client
from slotcar_client import BASE, Client, Session

from tests.unit.client.fake_engine import A, B, FakeServer
from tests.unit.client.ring.fake_ring import FakeRing, RingEngine


@pytest.fixture
def engine() -> RingEngine:
    return RingEngine(sql=A, chat=B)


@pytest.fixture
def ring(tmp_path: Path, engine: RingEngine) -> Iterator[FakeRing]:
    with FakeServer(tmp_path, engine) as server, FakeRing(server.target, engine) as ring:
        yield ring


@pytest.fixture
def client(ring: FakeRing) -> Iterator[Client]:
    with slotcar_client.connect(ring.target, timeout_seconds=20) as client:
        yield client


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.session("test", transport="ring") as session:
        session.set_mapping([("sql", 2), (BASE, 1)])
        yield session


@pytest.fixture
def small(client: Client) -> Iterator[Session]:
    """A session with little room."""
    with client.session("small", transport="ring", arena_bytes=4096) as session:
        session.set_mapping([("sql", 2), (BASE, 1)])
        yield session
