"""What a killed container leaves on its volumes stops none after it, and one that lives stops others."""

from __future__ import annotations

from pathlib import Path

import pytest
import slotcar_client

from tests.faults.oracle import Library
from tests.image.conftest import NAMES, Make
from tests.image.container import owned
from tests.image.engine import forward_is_right, load
from tests.waiting import eventually

pytestmark = [pytest.mark.image, pytest.mark.timeout(600)]


@pytest.fixture
def stored(folder: Path) -> dict[str, tuple[str, ...]]:
    """The settings and the volume of a disk tier and a journal."""
    cache = owned(folder / "cache")
    return {
        "settings": ("--disk", "/var/cache/slotcar/disk", "--journal", "/var/cache/slotcar/journal"),
        "options": ("--volume", f"{cache}:/var/cache/slotcar"),
    }


def test_killed_and_started_again(make: Make, library: Library, stored: dict[str, tuple[str, ...]]) -> None:
    """Sockets, locks and entries of the dead are taken over; names come back, and no epoch does."""
    first = make(*stored["settings"], options=stored["options"]).start()
    with slotcar_client.connect(first.target) as client:
        load(client)
        client.keep(NAMES[0])
        before = client.snapshot().layout.version.epoch
    journal = library.root.parent / "cache" / "journal"
    eventually(lambda: journal.exists() and NAMES[1].encode() in journal.read_bytes(), "the journal")
    first.signal("KILL")
    assert first.wait() == 128 + 9
    assert Path(first.target.removeprefix("unix://")).is_socket()

    second = make(*stored["settings"], options=stored["options"]).start()
    with slotcar_client.connect(second.target) as client:
        assert client.snapshot().layout.version.epoch != before
        assert {adapter.name for adapter in client.list()} == set(NAMES)
        for plane in ("stream", "ring", "direct"):
            with client.session(plane, transport=plane) as session:
                forward_is_right(session, library)


def test_killed_while_it_starts(make: Make, library: Library) -> None:
    first = make()
    first.run()
    first.signal("KILL")
    assert first.wait() == 128 + 9
    second = make().start()
    with slotcar_client.connect(second.target) as client:
        load(client)
        with client.session("engine") as session:
            forward_is_right(session, library)


def test_two_at_one_volume(make: Make, library: Library) -> None:
    """The second says who is there and ends; the first did not notice."""
    first = make().start()
    with slotcar_client.connect(first.target) as client:
        load(client)
        with client.session("engine") as session:
            forward_is_right(session, library)
            second = make()
            second.run()
            assert second.wait() == 1
            assert "slotcar.sock" in second.log
            assert "Traceback" not in second.log
            forward_is_right(session, library)
        with client.session("late") as session:
            forward_is_right(session, library)


def test_two_with_one_journal(make: Make, stored: dict[str, tuple[str, ...]]) -> None:
    """Also if their sockets are apart."""
    make(*stored["settings"], options=stored["options"]).start()
    apart = ("--listen", "unix:///run/slotcar/other.sock")
    second = make(*stored["settings"], *apart, options=stored["options"])
    second.run()
    assert second.wait() == 1
    assert "journal" in second.log
