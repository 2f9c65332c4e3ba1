"""Clients that compute from a real server's slots: whoever is stopped, killed or writes meanwhile, no row is wrong."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar_client import Client
from slotcar_client.session import Session

from tests.faults.direct_child import ROWS, DirectChild
from tests.faults.gauges import Gauges, descriptors
from tests.faults.oracle import Library, spec_file
from tests.faults.waiting import StandsStill, eventually, watching
from tests.planes.connection import Connection, hello
from tests.server import SidecarProcess

FEATURES = 64
SITES = dict.fromkeys(("first", "second"), (FEATURES, FEATURES))
A, B, C = "a", "b", "c"
IDLE_SECONDS = 0.5
X = torch.ones(ROWS, FEATURES)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    for seed, name in enumerate((A, B, C)):
        library.write(name, seed, list(SITES))
    return library


@pytest.fixture(scope="module")
def digests(library: Library) -> dict[str, str]:
    return dict(zip((A, B, C), library.parts, strict=True))


Serve = Callable[[int], SidecarProcess]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[Serve]:
    """Starts a sidecar with that many slots."""
    with ExitStack() as stack:

        def start(slots: int) -> SidecarProcess:
            folder = tmp_path_factory.mktemp("s")
            flags = ("--model-spec", str(spec_file(folder, SITES)), "--metrics", "127.0.0.1:0")
            idle = ("--mapping-idle-seconds", str(IDLE_SECONDS))
            return stack.enter_context(SidecarProcess(folder, library.root, slots, extra=(*flags, *idle)))

        yield start


@pytest.fixture(scope="module")
def one_slot(serve: Serve) -> SidecarProcess:
    return serve(1)


@pytest.fixture(scope="module")
def served(serve: Serve) -> SidecarProcess:
    return serve(3)


@pytest.fixture
def client(served: SidecarProcess, library: Library) -> Iterator[Client]:
    with slotcar_client.connect(served.target, timeout_seconds=30) as client:
        for name in (A, B, C):
            client.load(name, library.root / name)
        yield client


def assert_rows(library: Library, digest: str, deltas: Any) -> None:
    """All rows of all sites are the digest's."""
    assert deltas.keys() == SITES.keys()
    for site, delta in deltas.items():
        assert not library.wrong_rows([digest], [ROWS], site, X, torch.as_tensor(delta))


def compute(session: Session) -> dict[str, torch.Tensor]:
    return session.forward(dict.fromkeys(SITES, X), row_counts=(ROWS,))


def child_of(sidecar: SidecarProcess, when: str) -> DirectChild:
    """A client with a mapping of A that can stop there."""
    role = "computing" if when == "kernel" else "computing_with_torch"
    return DirectChild(role, sidecar.target, A, ",".join(SITES), FEATURES)


def shared_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return [line for line in lines if "memfd:slotcar-slots" in line]


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


# What is shared


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
