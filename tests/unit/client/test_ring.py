"""Forward over the ring, against a sidecar that answers as it is told: what travels, what comes back, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import slotcar_client
import torch
from slotcar.shm import region
from slotcar_client import BASE, Client, Session
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, B, FakeServer
from tests.unit.client.fake_ring import FakeRing, RingEngine

X = torch.arange(12.0).reshape(3, 4)


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


def test_forward_answers_for_the_mapping(session: Session, ring: FakeRing) -> None:
    out = session.forward({"q": X})
    assert torch.equal(out["q"], X)
    assert (ring.forwards[0].row_counts, ring.forwards[0].mapping_id, ring.forwards[0].generation) == ((2, 1), 1, 1)
    assert torch.equal(session.forward({"q": X + 1}, row_counts=[1, 2])["q"], X + 1)
    assert ring.forwards[1].row_counts == (1, 2)
    assert ring.kinds == [region.Kind.SET_MAPPING, region.Kind.FORWARD, region.Kind.FORWARD]
