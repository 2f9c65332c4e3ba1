"""A sidecar that is killed at each named point, stopped, or started again, while a client uses its ring."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import slotcar_client
import torch
from slotcar_client import Session

from tests.unit.client.fake_engine import A
from tests.unit.client.ring.child import POINTS, Child
from tests.waiting import eventually

X = torch.arange(12.0).reshape(3, 4)
PATIENCE_SECONDS = 30.0


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    with Child(tmp_path) as child:
        yield child


def opened(child: Child, timeout_seconds: float = PATIENCE_SECONDS, **settings: object) -> Session:
    client = slotcar_client.connect(child.target, timeout_seconds=timeout_seconds)
    session = client.session("faults", transport="ring", **settings)  # type: ignore[arg-type]
    session.set_mapping([(f"sql@{A}", 3)])
    return session


def answers(session: Session, value: float) -> bool:
    """Whether it does by now; what it answers is right."""
    try:
        output = session.forward({"q": X + value})["q"]
    except slotcar_client.TransportError:
        return False
    assert torch.equal(output, X + value)
    return True


def descriptors() -> int:
    """Doorbells and memory files that are open or mapped here."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:fake")
    return sum("memfd:fake" in link or "eventfd" in link for link in links) + mapped


@pytest.mark.parametrize("point", POINTS)
def test_a_sidecar_that_is_killed_is_away_at_once(child: Child, point: str) -> None:
    child.start(point)
    if point in ("hello", "offer"):
        with pytest.raises(slotcar_client.Unavailable):
            opened(child)
        assert child.wait() == -signal.SIGKILL
        return
    session = opened(child)
    if point in ("written", "rung"):
        assert torch.equal(session.forward({"q": X})["q"], X), "the answer was there"
    with pytest.raises(slotcar_client.Unavailable):
        session.forward({"q": X})
    assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("point", ["before", "reply"])
def test_with_patience_a_call_goes_on_by_digest_when_the_sidecar_is_back(child: Child, point: str) -> None:
    child.start(point)
    session = opened(child, away="wait")
    pending = [session.forward_async({"q": X + value}) for value in range(3)]
    again = threading.Thread(target=lambda: (child.wait(), child.start()))
    again.start()
    for value, one in enumerate(pending):
        assert torch.equal(one.result()["q"], X + value)
    again.join()
    assert session.mapping is not None
    assert session.mapping.entries == (f"sql@{A}",)
    assert session.transport == "ring"
    assert session.recoveries["SESSION_NOT_FOUND"] >= 1
    session.close()


def test_a_sidecar_that_was_started_again_meanwhile_is_no_error(child: Child) -> None:
    child.start()
    session = opened(child)
    before = session.session_id, session.layout.version.epoch
    child.send(signal.SIGKILL)
    child.wait()
    child.start()

    eventually(lambda: answers(session, 1))
    assert session.layout.version.epoch != before[1]
    session.close()


def test_a_sidecar_that_is_stopped_is_waited_for_until_the_deadline(child: Child) -> None:
    child.start()
    session = opened(child, timeout_seconds=1.0)
    child.stop()
    pending = session.forward_async({"q": X + 1})
    with pytest.raises(slotcar_client.DeadlineExceeded):
        session.forward({"q": X + 2})
    child.send(signal.SIGCONT)
    eventually(lambda: answers(session, 3))
    assert torch.equal(pending.result()["q"], X + 1)
    assert session.recoveries == {}
    session.close()


def test_nothing_is_left_of_connections(child: Child) -> None:
    child.start()
    client = slotcar_client.connect(child.target)
    client.session(transport="stream").close()
    before = descriptors()
    for _ in range(5):
        with client.session(transport="ring") as session:
            session.set_mapping([("sql", 3)])
            for _ in range(3):
                session.forward({"q": X})
            unread = session.forward_async({"q": X})
            assert descriptors() > before
        del unread
    assert descriptors() <= before  # what other tests left may go meanwhile
    client.close()


def test_memory_of_a_sidecar_that_is_gone_can_be_read(child: Child) -> None:
    child.start()
    session = opened(child)
    session.forward({"q": X})
    child.send(signal.SIGKILL)
    child.wait()
    connection = session._choice.transport._line.cells.connection  # type: ignore[attr-defined]
    assert not connection.is_alive()
    assert connection.words[0] == int.from_bytes(b"SLOTCARR", "little")
    session.close()
