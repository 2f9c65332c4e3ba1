"""A client, and a session of it on each transport of gRPC, of a server that answers what a test says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import slotcar_client
from slotcar_client import Client, Session

from tests.unit.client.fake_engine import A, B, FakeEngine, FakeServer


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(sql=A, chat=B)


@pytest.fixture
def client(tmp_path: Path, engine: FakeEngine) -> Iterator[Client]:
    with FakeServer(tmp_path, engine) as server, slotcar_client.connect(server.target, timeout_seconds=20) as client:
        yield client


@pytest.fixture(params=["stream", "unary"])
def session(request: pytest.FixtureRequest, client: Client) -> Iterator[Session]:
    with client.session("test", transport=request.param) as session:
        yield session
