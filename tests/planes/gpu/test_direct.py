"""Clients that compute on the GPU of a real server's slots: whatever happens under their kernels, no row is wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import slotcar_client
import torch
from slotcar.v1 import model_pb2
from slotcar_client import Client
from slotcar_client.session import Session
from slotcar_sidecar.command.doctor import examine

from tests.faults.child import REPOSITORY, Child
from tests.faults.oracle import Library
from tests.faults.watching import Watcher, watching
from tests.planes.gpu.host import HOST
from tests.planes.gpu.sidecar import GpuSidecar
from tests.waiting import eventually

FEATURES = 64
SITES = dict.fromkeys(("first", "second"), (FEATURES, FEATURES))
A, B = "a", "b"
ROWS = 2
X = torch.ones(ROWS, FEATURES)
SPEC = model_pb2.ModelSpec(
    sites=[model_pb2.Site(name=name, in_features=FEATURES, out_features=FEATURES) for name in SITES]
)
IDLE = ("--mapping-idle-seconds", "0.5")

Serve = Callable[..., GpuSidecar]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    for seed, name in enumerate((A, B)):
        library.write(name, seed, list(SITES))
    return library


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(slots: int, **environment: str) -> GpuSidecar:
            folder = tmp_path_factory.mktemp("s")
            made = GpuSidecar(folder, library.root, slots, extra=IDLE, environment=environment)
            return stack.enter_context(made)

        yield start


@pytest.fixture(scope="module")
def one_slot(serve: Serve) -> GpuSidecar:
    return serve(1)


def connected(sidecar: GpuSidecar, library: Library) -> Client:
    """To a server that knows the model and has A in a slot."""
    client = slotcar_client.connect(sidecar.target, timeout_seconds=60)
    with client.session("shape", model_spec=SPEC, transport="stream"):
        client.load(A, library.root / A)
    return client


@pytest.fixture
def client(one_slot: GpuSidecar, library: Library) -> Iterator[Client]:
    with connected(one_slot, library) as client:
        yield client
        for session in client.sessions():
            client.end_session(session.session)


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.session("engine", transport="direct") as session:
        session.set_mapping([A], load=True)
        yield session


def compute(session: Session) -> dict[str, torch.Tensor]:
    return session.forward(dict.fromkeys(SITES, X), row_counts=(ROWS,))


def assert_rows(library: Library, name: str, deltas: dict[str, torch.Tensor]) -> None:
    """All rows of all sites are the adapter's."""
    digest = dict(zip((A, B), library.parts, strict=True))[name]
    assert deltas.keys() == SITES.keys()
    for site, delta in deltas.items():
        assert not library.wrong_rows([digest], [ROWS], site, X, delta)


def replace_a(client: Client, library: Library, events: Watcher, session: str) -> None:
    """B takes A's slot, once the session's mapping is idle."""
    events.wait("expired", session=session[:8])
    client.load(B, library.root / B)


def mapped() -> list[str]:
    """The lines of what this process has mapped of a GPU's memory."""
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return [line for line in lines if "memfd:fake-gpu" in line]


def test_its_rows_are_the_adapters(session: Session, library: Library) -> None:
    assert (session.transport, session.transport_reason) == ("direct", "direct was asked for")
    assert_rows(library, A, compute(session))


# While kernels are under way


def test_a_slot_that_is_refilled_under_kernels_is_computed_again(
    client: Client, session: Session, library: Library
) -> None:
    """They read the other adapter's bytes. The mapping is set again by its digest, and only then do rows leave."""
    assert_rows(library, A, compute(session))
    with watching(client) as events:
        HOST.pause(lambda: replace_a(client, library, events, session.session_id))
        assert_rows(library, A, compute(session))
    assert session.recoveries == {"LAYOUT_STALE": 1}


def test_so_is_one_that_was_sent_ahead(client: Client, session: Session, library: Library) -> None:
    assert_rows(library, A, compute(session))
    with watching(client) as events:
        HOST.pause(lambda: None)
        pending = session.forward_async(dict.fromkeys(SITES, X), row_counts=(ROWS,))
        assert not pending.done()
        replace_a(client, library, events, session.session_id)
        assert_rows(library, A, pending.result())
    assert pending.done()
    assert session.recoveries == {"LAYOUT_STALE": 1}


def test_several_are_under_way(session: Session, library: Library) -> None:
    HOST.pause(lambda: None)
    pending = [session.forward_async(dict.fromkeys(SITES, X), row_counts=(ROWS,)) for _ in range(3)]
    assert len(HOST.launched) == 3 * len(SITES)
    for one in reversed(pending):
        assert_rows(library, A, one.result())


def test_a_forced_unload_under_kernels_leaves_no_rows(client: Client, session: Session, library: Library) -> None:
    HOST.pause(lambda: client.unload(A, force=True))
    with pytest.raises(slotcar_client.AdapterNotFound):
        compute(session)
    client.load(A, library.root / A)
    session.set_mapping([A])
    assert_rows(library, A, compute(session))


def test_nothing_is_launched_on_slots_that_changed_before(client: Client, session: Session, library: Library) -> None:
    assert_rows(library, A, compute(session))
    client.unload(A, force=True)
    waits: list[None] = []
    HOST.pause(lambda: waits.append(None))
    with pytest.raises(slotcar_client.AdapterNotFound):
        compute(session)
    assert (HOST.launched, waits) == ([], [])
    HOST.wait()


def test_a_client_that_is_killed_under_its_kernels_keeps_nobody_from_its_slot(
    client: Client, one_slot: GpuSidecar, library: Library
) -> None:
    child = Running("tests.planes.gpu.child", one_slot.target, A, "first", str(FEATURES))
    with watching(client) as events, child:
        number = child.read()["session"]
        child.begin()
        events.wait("expired", session=number[:8])
        child.kill()
        client.load(B, library.root / B)
        with client.session("engine", transport="direct") as session:
            session.set_mapping([B])
            assert_rows(library, B, compute(session))


class Running(Child):
    """A module of these tests, in a process of its own."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self) -> None:
        """Returns when it has stopped itself."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None
        assert found.si_code == os.CLD_STOPPED, "the client ended"
        assert found.si_status == signal.SIGSTOP


# The server's end


def test_a_server_that_is_killed_under_kernels_is_noticed_and_its_memory_given_back(
    serve: Serve, library: Library
) -> None:
    """Until they are complete it stays mapped, whoever made it."""
    sidecar = serve(2)
    with connected(sidecar, library) as client, client.session("engine", transport="direct") as session:
        session.set_mapping([A], load=True)
        assert_rows(library, A, compute(session))
        (before,), finished = mapped(), HOST.finished
        HOST.pause(sidecar.kill)
        with pytest.raises(slotcar_client.Unavailable):
            compute(session)
        assert (mapped(), HOST.finished) == ([], finished + 1)
        sidecar.start()
        eventually(lambda: answers(client), "the client's channel to the new server")
        with client.session("shape", model_spec=SPEC, transport="stream"):
            client.load(B, library.root / B)
            client.load(A, library.root / A)
        assert_rows(library, A, compute(session))
        (after,) = mapped()
        assert before.split()[4:] != after.split()[4:], "other memory"
        assert session.transport == "direct"


def test_a_result_of_a_connection_that_has_ended_is_none(serve: Serve, library: Library) -> None:
    """A call has noticed the end when the kernels of another are done: its socket's number is a third one's then."""
    sidecar = serve(2)
    with connected(sidecar, library) as client, client.session("engine", transport="direct") as session:
        session.set_mapping([A], load=True)
        HOST.pause(lambda: None)
        pending = session.forward_async(dict.fromkeys(SITES, X), row_counts=(ROWS,))
        sidecar.kill()
        with pytest.raises(slotcar_client.Unavailable):
            session.set_mapping([A])
        others = [socket.socketpair() for _ in range(8)]
        with pytest.raises(slotcar_client.Unavailable):
            pending.result()
    for one in (one for pair in others for one in pair):
        one.close()


def test_a_session_that_is_closed_under_its_kernels_waits_for_them(client: Client) -> None:
    with client.session("engine", transport="direct") as session:
        session.set_mapping([A], load=True)
        HOST.pause(lambda: None)
        pending = session.forward_async(dict.fromkeys(SITES, X), row_counts=(ROWS,))
        assert HOST.launched
    assert (HOST.launched, mapped()) == ([], [])
    with pytest.raises(slotcar_client.SessionClosed):
        pending.result()


def answers(client: Client) -> bool:
    try:
        client.list()
    except slotcar_client.Unavailable:
        return False
    return True


# What is mapped, and where it cannot be


def test_the_slots_are_mapped_for_reading(session: Session) -> None:
    compute(session)
    (line,) = mapped()
    assert line.split()[1] == "r--s"


def test_a_driver_that_cannot_map_for_reading_maps_all_the_same(
    client: Client, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuMemSetAccess:1=801")
    with client.session("engine", transport="direct") as session:
        session.set_mapping([A], load=True)
        assert_rows(library, A, compute(session))


CALLS = ("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess:1=801,cuMemSetAccess:3")


@pytest.mark.parametrize("call", CALLS)
def test_memory_that_cannot_be_mapped_leaves_the_ring_with_the_reason(
    client: Client, one_slot: GpuSidecar, library: Library, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"{call}=801")
    why = f"cannot be read here: {call.partition(':')[0]}: CUDA_ERROR_801"
    with client.session("engine") as session:
        assert session.transport == "ring"
        assert why in session.transport_reason
        session.set_mapping([A], load=True)
        assert_rows(library, A, compute(session))
    with pytest.raises(slotcar_client.RequestInvalid, match=why):
        client.session("engine", transport="direct")
    (found,) = [check for check in examine(one_slot.target) if check.what == "direct plane"]
    assert found.state == "note"
    assert why in found.found
    assert mapped() == [], "nothing is left of the attempts"


@pytest.mark.parametrize(("gpus", "transport"), [("BA", "direct"), ("AB", "direct"), ("B", "ring")])
def test_the_slots_gpu_is_found_whatever_its_number_or_refused(
    client: Client, library: Library, gpus: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_GPUS", gpus)
    with client.session("engine") as session:
        assert session.transport == transport
        if transport == "ring":
            assert f"does not see the slots' GPU, {(b'A' * 16).hex()}" in session.transport_reason
            return
        assert HOST.index == gpus.index("A")
        session.set_mapping([A], load=True)
        assert_rows(library, A, compute(session))


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"SLOTCAR_TEST_DRIVER": ""}, "the machine has no driver"),
        ({"FAKE_CUDA_FAIL": "cuDeviceGetAttribute:103=1"}, "cannot be exported by descriptors"),
        ({"FAKE_CUDA_FAIL": "cuMemExportToShareableHandle=801"}, "cuMemExportToShareableHandle: CUDA_ERROR_801"),
    ],
)
def test_a_server_that_cannot_share_its_slots_says_why(
    serve: Serve, library: Library, environment: dict[str, str], why: str
) -> None:
    sidecar = serve(1, **environment)
    with connected(sidecar, library) as client, client.session("engine") as session:
        assert session.transport == "ring"
        assert why in session.transport_reason
        session.set_mapping([A])
        assert_rows(library, A, compute(session))
