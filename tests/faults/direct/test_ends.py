"""Clients and servers that are stopped or killed while rows are computed from the slots: no row is wrong."""

from __future__ import annotations

import pytest
import slotcar_client
from slotcar_client import Client

from tests.faults.direct.units import A, C, Serve, assert_rows, child_of, compute, shared_files
from tests.faults.oracle import Library
from tests.faults.watching import watching
from tests.server import SidecarProcess
from tests.waiting import eventually

# Clients that are stopped


@pytest.mark.parametrize("grace", ["stands", "is over"])
@pytest.mark.parametrize("when", ["first", "middle", "last", "kernel"])
def test_a_client_that_was_stopped_in_a_unit_notices_that_its_slot_was_refilled(
    one_slot: SidecarProcess, library: Library, digests: dict[str, str], when: str, grace: str
) -> None:
    """By an ordinary load, which takes the slot of a mapping that is idle, or of a session that has ended."""
    with (
        slotcar_client.connect(one_slot.target, timeout_seconds=30) as client,
        watching(client) as events,
    ):
        client.load(A, library.root / A)
        with child_of(one_slot, when) as child:
            session = child.read()["session"][:8]
            assert_rows(library, digests[A], child.ask("compute")["rows"])
            child.begin(when)
            if grace == "is over":
                client.end_session(session)
            events.wait("session_ended" if grace == "is over" else "expired", session=session)
            client.load(C, library.root / C)
            assert client.get(C).slot == 0
            child.resume()
            answer = child.read()
            assert_rows(library, digests[A], answer["rows"])
            reason = "SESSION_NOT_FOUND" if grace == "is over" else "LAYOUT_STALE"
            assert answer["recoveries"][reason] == 1
            assert client.get(A).slot == 0
            for session_info in client.sessions():
                client.end_session(session_info.session)


def test_a_digest_that_came_back_meanwhile_is_computed_again(
    one_slot: SidecarProcess, library: Library, digests: dict[str, str]
) -> None:
    """A→C→A under a stopped unit: the slot has the right bytes at both checks, and had the wrong ones between them."""
    with (
        slotcar_client.connect(one_slot.target, timeout_seconds=30) as client,
        watching(client) as events,
    ):
        client.load(A, library.root / A)
        with child_of(one_slot, "middle") as child:
            session = child.read()["session"][:8]
            child.begin("middle")
            events.wait("expired", session=session)
            client.load(C, library.root / C)
            client.load(A, library.root / A)
            child.resume()
            answer = child.read()
            assert_rows(library, digests[A], answer["rows"])
            assert answer["recoveries"] == {"LAYOUT_STALE": 1}
            client.end_session(session)


@pytest.mark.full
def test_a_client_that_was_stopped_past_its_grace_by_the_clock_notices(
    one_slot: SidecarProcess, library: Library, digests: dict[str, str]
) -> None:
    """Only the server's keepalive tells a stopped process from a silent one: 20 s, and then the grace."""
    with (
        slotcar_client.connect(one_slot.target, timeout_seconds=30) as client,
        watching(client) as events,
    ):
        client.load(A, library.root / A)
        with child_of(one_slot, "middle") as child:
            session = child.read()["session"][:8]
            child.begin("middle")
            events.wait("expired", session=session)
            client.load(C, library.root / C)
            eventually(lambda: not client.sessions()[0].attached, "the end of the stream")
            client.end_session(session)
            child.resume()
            answer = child.read()
            assert_rows(library, digests[A], answer["rows"])
            assert answer["recoveries"]["SESSION_NOT_FOUND"] == 1


# The server's end


def test_a_server_that_is_killed_is_noticed_at_once_and_its_successor_taken(
    serve: Serve, library: Library, digests: dict[str, str]
) -> None:
    sidecar = serve(2)
    with slotcar_client.connect(sidecar.target, timeout_seconds=30) as client:
        client.load(A, library.root / A)
        with client.session("engine", transport="direct") as session:
            mapping = session.set_mapping([A])
            assert_rows(library, digests[A], compute(session))
            (before,) = shared_files()
            sidecar.kill()
            for _ in range(3):
                with pytest.raises(slotcar_client.Unavailable):
                    compute(session)
            sidecar.start()
            eventually(lambda: answers(client), "the client's channel to the new server")
            # What was slot 0 before is another's now.
            client.load(C, library.root / C)
            client.load(A, library.root / A)
            assert_rows(library, digests[A], compute(session))
            assert session.mapping is not None
            assert session.mapping.version.epoch != mapping.version.epoch
            (after,) = shared_files()
            assert before.split()[4:] != after.split()[4:], "another file, and nothing of the old one"
            assert session.transport == "direct"


def answers(client: Client) -> bool:
    try:
        client.list()
    except slotcar_client.Unavailable:
        return False
    return True


@pytest.mark.parametrize("when", ["middle", "kernel"])
def test_a_server_that_is_killed_under_a_unit_discards_it(
    serve: Serve, library: Library, digests: dict[str, str], when: str
) -> None:
    sidecar = serve(1)
    with slotcar_client.connect(sidecar.target, timeout_seconds=30) as client:
        client.load(A, library.root / A)
        with child_of(sidecar, when) as child:
            child.read()
            child.begin(when)
            sidecar.kill()
            child.resume()
            assert child.read()["error"] == "UNAVAILABLE"
            sidecar.start()
            eventually(lambda: answers(client), "the client's channel to the new server")
            client.load(A, library.root / A)
            eventually(lambda: "rows" in child.ask("compute"), "the child's channel to the new server")
            assert_rows(library, digests[A], child.ask("compute")["rows"])


def test_a_server_that_ends_in_order_is_away(serve: Serve, library: Library, digests: dict[str, str]) -> None:
    sidecar = serve(1)
    with (
        slotcar_client.connect(sidecar.target, timeout_seconds=30) as client,
        client.session("engine", transport="direct") as session,
    ):
        client.load(A, library.root / A)
        session.set_mapping([A])
        assert_rows(library, digests[A], compute(session))
        assert sidecar.stop() == 0
        with pytest.raises(slotcar_client.SlotcarError) as caught:
            compute(session)
        assert caught.value.code.name == "UNAVAILABLE"


def test_a_server_that_is_stopped_keeps_no_unit_waiting(
    client: Client, served: SidecarProcess, library: Library, digests: dict[str, str]
) -> None:
    with client.session("engine", transport="direct") as session:
        session.set_mapping([A])
        served.pause()
        try:
            for _ in range(3):
                assert_rows(library, digests[A], compute(session))
        finally:
            served.resume()
        session.fence()
        assert_rows(library, digests[A], compute(session))
        session.release_mapping()
        assert client.get(A).pins == 0
        with pytest.raises(slotcar_client.MappingReplaced):
            compute(session)
