"""What clients of one server share, and what is left of each: nobody writes, and nothing stays."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
from slotcar_client import Client
from slotcar_client.session import Session

from tests.faults.direct.child import ROWS, DirectChild
from tests.faults.direct.units import FEATURES, SITES, A, B, C, X, assert_rows, child_of, compute, shared_files
from tests.faults.gauges import Gauges, descriptors
from tests.faults.oracle import Library
from tests.faults.watching import watching
from tests.planes.connection import Connection, hello
from tests.server import SidecarProcess
from tests.waiting import StandsStill, eventually


def test_a_write_through_the_mapping_is_a_fault_of_the_writer(
    client: Client, served: SidecarProcess, library: Library, digests: dict[str, str]
) -> None:
    with client.session("engine", transport="direct") as session:
        session.set_mapping([A])
        with DirectChild("writing", served.target, A, ",".join(SITES), FEATURES) as child:
            writer = child.read()["session"][:8]
            child.read()
            assert child.process.stdin is not None
            print("write", file=child.process.stdin, flush=True)
            assert child.process.wait(30) == -signal.SIGSEGV
        assert_rows(library, digests[A], compute(session))
        client.end_session(writer)


def test_the_descriptors_of_the_slots_give_no_way_to_write(client: Client, served: SidecarProcess) -> None:
    with client.session("engine", transport="stream") as session:
        connection = Connection(served.target, hello(session.session_id, "direct"))
        region, _, _, slots = connection.descriptors
        size = connection.opened.slots_bytes
        with pytest.raises(PermissionError):
            mmap.mmap(slots, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(slots, b"\0" * 8, 0)
        again = os.open(f"/proc/self/fd/{slots}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(again, size, mmap.MAP_SHARED, mmap.PROT_WRITE)
        for descriptor in (region, slots, again):
            for length in (0, 4096, size * 2):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, length)
            with pytest.raises(PermissionError):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        os.close(again)
        connection.close()


def test_two_sessions_of_one_name_are_two(
    client: Client, served: SidecarProcess, library: Library, digests: dict[str, str]
) -> None:
    with client.session("twin", transport="direct") as first:
        first.set_mapping([A])
        with client.session("twin", transport="direct") as second:
            second.set_mapping([B])
            for _ in range(2):
                assert_rows(library, digests[A], compute(first))
                assert_rows(library, digests[B], compute(second))
        assert_rows(library, digests[A], compute(first))
        with slotcar_client.connect(served.target) as other, other.session("twin", transport="direct") as third:
            third.set_mapping([C])
            assert_rows(library, digests[C], compute(third))
            client.end_session(third.session_id[:8])
            assert_rows(library, digests[A], compute(first))
            assert_rows(library, digests[C], compute(third))
            assert third.recoveries["SESSION_NOT_FOUND"] == 1


def test_a_mapping_that_computes_is_not_idle(client: Client, library: Library, digests: dict[str, str]) -> None:
    """The sidecar sees its use: the other one, which does not compute, loses its pins meanwhile."""
    with (
        watching(client) as events,
        client.session("busy", transport="direct") as busy,
        client.session("idle", transport="direct") as idle,
    ):
        busy.set_mapping([A])
        idle.set_mapping([B])
        done = threading.Event()
        computed = threading.Thread(target=compute_until, args=(busy, done))
        computed.start()
        try:
            for _ in range(3):
                events.wait("expired", session=idle.session_id[:8])
                idle.set_mapping([B])
        finally:
            done.set()
            computed.join()
        assert not [event for event in events.seen if event.session == busy.session_id[:8] and event.kind == "expired"]
        assert_rows(library, digests[A], compute(busy))
        assert busy.recoveries == {}


def compute_until(session: Session, done: threading.Event) -> None:
    while not done.is_set():
        compute(session)


def test_an_idle_mapping_that_computes_again_takes_its_pins_again(
    client: Client, library: Library, digests: dict[str, str]
) -> None:
    with watching(client) as events, client.session("engine", transport="direct") as session:
        session.set_mapping([A])
        events.wait("expired", session=session.session_id[:8])
        assert client.get(A).pins == 0
        assert_rows(library, digests[A], compute(session))
        eventually(lambda: compute(session) and client.get(A).pins == 1, "the pins")
        assert session.recoveries == {}


def test_units_are_counted_by_the_server(client: Client, served: SidecarProcess) -> None:
    forwards, rows = (f'slotcar_{name}_total{{plane="direct"' for name in ("forwards", "forward_rows"))

    def counted() -> tuple[int, int]:
        text = Gauges(served).text()
        series = [line.rsplit(" ", 1) for line in text.splitlines()]
        found = [sum(int(float(value)) for name, value in series if name.startswith(each)) for each in (forwards, rows)]
        return found[0], found[1]

    eventually(StandsStill(lambda: 1 + counted()[0]))
    before = counted()
    with client.session("engine", transport="direct") as session:
        session.set_mapping([A])
        for _ in range(5):
            compute(session)
        wanted = before[0] + 5, before[1] + 5 * ROWS
        eventually(lambda: counted() == wanted, f"{wanted}")
        compute(session)
    eventually(lambda: counted() == (wanted[0] + 1, wanted[1] + ROWS), "the last unit of a session that is closed")


# What is left


def test_nothing_is_left_of_a_session(client: Client, served: SidecarProcess) -> None:
    """No memory, no descriptor on either side, no pin."""
    before = ours(), settled(served)
    for _ in range(3):
        with client.session("engine", transport="direct") as session:
            session.set_mapping([A, B])
            output = session.forward(dict.fromkeys(SITES, X), row_counts=(1, 1))
        assert ours() == before[0]
        assert output["first"].any()
    eventually(lambda: descriptors(served) <= before[1], "the end of the server's descriptors")
    assert [adapter.pins for adapter in client.list()] == [0, 0, 0]


def ours() -> tuple[int, int]:
    """How many shared files are mapped here and how many descriptors are open, without those of tests before."""
    gc.collect()
    return len(shared_files()), len(list(Path("/proc/self/fd").iterdir()))


def settled(sidecar: SidecarProcess) -> Any:
    eventually(StandsStill(lambda: descriptors(sidecar).total()))
    return descriptors(sidecar)


def test_nothing_is_left_of_a_client_that_is_killed_in_a_unit(client: Client, served: SidecarProcess) -> None:
    before = settled(served)
    for when in ("first", "middle", "last", "kernel"):
        with child_of(served, when) as child:
            session = child.read()["session"][:8]
            child.begin(when)
            child.kill()
            client.end_session(session)
    eventually(lambda: descriptors(served) <= before, "the end of the server's descriptors")
    assert client.sessions() == ()
    assert [adapter.pins for adapter in client.list()] == [0, 0, 0]


def test_a_session_may_be_closed_while_it_computes(client: Client, library: Library, digests: dict[str, str]) -> None:
    for _ in range(10):
        session = client.session("engine", transport="direct")
        session.set_mapping([A])
        ends: list[slotcar_client.SlotcarError] = []
        begun = threading.Event()
        threads = [threading.Thread(target=compute_to_the_end, args=(session, begun, ends)) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert begun.wait(30)
        session.close()
        for thread in threads:
            thread.join()
        assert {type(error) for error in ends} == {slotcar_client.SessionClosed}


def compute_to_the_end(session: Session, begun: threading.Event, ends: list[slotcar_client.SlotcarError]) -> None:
    try:
        while True:
            assert compute(session)["first"].any()
            begun.set()
    except slotcar_client.SlotcarError as error:
        ends.append(error)
