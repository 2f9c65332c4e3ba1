"""SIGTERM and SIGINT in every state of a server: it stops taking work, serves what it has, and ends with 0."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import slotcar_client
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from slotcar_client import Client, ShuttingDown, SlotcarError

from tests.faults.child import Child
from tests.faults.mute import is_full, mute_client
from tests.faults.oracle import Library, spec_file
from tests.faults.raw import RawEngine, refusal
from tests.server import SidecarProcess
from tests.waiting import PATIENCE_SECONDS, eventually

SMALL, FEATURES = "small", 64
WIDE = tuple(f"wide.{index}" for index in range(48))
SITES = {SMALL: (FEATURES, FEATURES)} | dict.fromkeys(WIDE, (2048, 2048))
A, LARGE = "a", "large"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])

Start = Callable[..., SidecarProcess]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), SITES)
    library.write(A, seed=1, sites=[SMALL])
    library.write(LARGE, seed=2, sites=[SMALL, *WIDE], rank=64)
    return library


@pytest.fixture
def start(start_sidecar: Start, library: Library, tmp_path: Path) -> Callable[[float], SidecarProcess]:
    """Starts a server with adapter A in a slot, which after a signal serves at most so many seconds."""

    def make(seconds: float) -> SidecarProcess:
        extra = ("--model-spec", str(spec_file(tmp_path, SITES)), "--shutdown-seconds", str(seconds))
        sidecar = start_sidecar(library.root, max_rank=64, extra=extra)
        with slotcar_client.connect(sidecar.target) as client:
            client.load(A, library.root / A)
        return sidecar

    return make


def ends_well(sidecar: SidecarProcess) -> None:
    """It exits with 0, takes its socket away and says nothing strange."""
    assert sidecar.process is not None
    assert sidecar.process.wait(PATIENCE_SECONDS) == 0, sidecar.log
    assert not Path(sidecar.target.removeprefix("unix://")).exists()
    assert "stopped" in sidecar.log
    for strange in ("Traceback", "Exception ignored", "never retrieved", "was destroyed but it is pending"):
        assert strange not in sidecar.log, sidecar.log


@contextmanager
def health(channel: grpc.Channel, service: str) -> Iterator[Iterator[int]]:
    """The states of a health service, as they change."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
    yield (response.status for response in watch)
    watch.cancel()


@SIGNALS
def test_with_a_session_that_is_idle(start: Callable[[float], SidecarProcess], number: int) -> None:
    """A session and watches of events and of health are open; nobody computes, so a minute is not waited for."""
    sidecar = start(60)
    assert sidecar.process is not None
    with (
        slotcar_client.connect(sidecar.target) as client,
        client.session("idle") as session,
        RawEngine(sidecar.target) as raw,
        health(raw.channel, "liveness") as live,
    ):
        session.set_mapping([(A, 1)])
        session.forward({SMALL: torch.ones(1, FEATURES)})
        assert next(live) == SERVING
        with client.events() as events:
            sidecar.process.send_signal(number)
            with pytest.raises(ShuttingDown) as caught:
                list(events)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        # Nor does a signal spoil the end once nothing waits for it any more.
        eventually(lambda: "stopped" in sidecar.log, "the last line of the log")
        sidecar.process.send_signal(number)
        ends_well(sidecar)


def test_with_a_session_that_computes_without_end(start: Callable[[float], SidecarProcess], library: Library) -> None:
    """It is served until the deadline and then gets UNAVAILABLE. New sessions and loads are refused at once."""
    sidecar = start(1.5)
    assert sidecar.process is not None
    x = torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(1))
    ends: list[SlotcarError] = []
    answers = 0
    with (
        slotcar_client.connect(sidecar.target) as client,
        client.session("busy") as session,
        RawEngine(sidecar.target) as raw,
    ):
        mapping = session.set_mapping([(A, 2)])
        raw.open()

        def compute() -> None:
            nonlocal answers
            try:
                while True:
                    found = session.forward({SMALL: x})[SMALL]
                    assert library.wrong_rows(mapping.entry_digests, [2], SMALL, x, found) == []
                    answers += 1
            except SlotcarError as error:
                ends.append(error)

        thread = threading.Thread(target=compute)
        thread.start()
        with health(raw.channel, "readiness") as ready:
            assert next(ready) == SERVING
            sidecar.process.send_signal(signal.SIGTERM)
            assert next(ready) == NOT_SERVING
        before = answers
        _refuses_new_work(client, sidecar, library)
        with health(raw.channel, "liveness") as live:
            assert next(live) == SERVING
        # What is open goes on: its mapping may change, and operators may unload.
        assert raw.map(A, "").generation
        assert client.unload(A).slot_state == "draining"
        eventually(lambda: answers > before + 20, "Forwards during the shut-down")
        thread.join(PATIENCE_SECONDS)
        assert [error.code for error in ends] == [grpc.StatusCode.UNAVAILABLE], ends
        with pytest.raises(grpc.RpcError) as caught:
            list(raw.stream)
        assert refusal(caught.value)[:2] == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        ends_well(sidecar)


def _refuses_new_work(client: Client, sidecar: SidecarProcess, library: Library) -> None:
    with pytest.raises(ShuttingDown):
        client.session("new")
    with pytest.raises(ShuttingDown):
        client.load("new", library.root / A)
    with slotcar_client.connect(sidecar.target) as other:
        with pytest.raises(ShuttingDown):
            other.session("new connection")
        assert [adapter.name for adapter in other.list()] == [A]


def test_during_a_load(start: Callable[[float], SidecarProcess], library: Library) -> None:
    """Whoever waits for the load gets its answer, or UNAVAILABLE; and a second signal changes nothing."""
    sidecar = start(5)
    assert sidecar.process is not None
    with Child("load", sidecar.target, LARGE, str(library.root / LARGE)) as child:
        assert child.read() == {"done": False}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            sidecar.process.send_signal(number)
        end = child.read()
        assert end.get("error", "UNAVAILABLE") == "UNAVAILABLE", end
        ends_well(sidecar)


def test_with_a_client_that_takes_no_answers(start: Callable[[float], SidecarProcess]) -> None:
    """As one does that was stopped: what gRPC has for it fills the socket, and stays there."""
    sidecar = start(1)
    assert sidecar.process is not None
    with mute_client(sidecar.target.removeprefix("unix://")) as peer:
        eventually(lambda: is_full(peer), "a full socket")
        sidecar.process.send_signal(signal.SIGTERM)
        ends_well(sidecar)
    assert "takes nothing of what was sent" in sidecar.log


@pytest.mark.full
def test_with_a_disk_that_does_not_answer(start_sidecar: Start, library: Library, tmp_path: Path) -> None:
    """As if another server kept its lock for ever: the process ends all the same, some seconds after its deadline."""
    disk = tmp_path / "disk"
    sidecar = start_sidecar(library.root, extra=("--disk", str(disk), "--shutdown-seconds", "1"))
    assert sidecar.process is not None
    with (disk / "lock").open("rb") as lock, slotcar_client.connect(sidecar.target) as client:
        fcntl.flock(lock, fcntl.LOCK_EX)
        client.load(A, library.root / A, tier="host")
        sidecar.process.terminate()
        assert sidecar.process.wait(PATIENCE_SECONDS) == 0, sidecar.log
    assert "the time is over" in sidecar.log


@SIGNALS
@pytest.mark.parametrize("moment", ["the handler is set", "torch is being imported", "the settings are printed"])
def test_during_the_start(tmp_path: Path, number: int, moment: str) -> None:
    """The moments are found in /proc and in the log."""
    sidecar = SidecarProcess(tmp_path, tmp_path)
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(sidecar.command(), stdout=log, stderr=log) as process:
        proc = Path(f"/proc/{process.pid}")
        reached = {
            "the handler is set": lambda: _catches(proc, signal.SIGTERM),
            "torch is being imported": lambda: "libtorch" in (proc / "maps").read_text(encoding="utf-8"),
            "the settings are printed": lambda: "settings" in sidecar.log,
        }[moment]
        try:
            eventually(reached, moment)
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(PATIENCE_SECONDS) == 0, sidecar.log
        finally:
            process.kill()
    assert not Path(sidecar.target.removeprefix("unix://")).exists()
    assert "Traceback" not in sidecar.log
    assert "Aborted" not in sidecar.log


def _catches(proc: Path, number: int) -> bool:
    """Whether the process has a handler of its own for the signal."""
    caught = next(line for line in (proc / "status").read_text(encoding="ascii").splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_before_the_start(tmp_path: Path) -> None:
    """Before Python has run a line of ours only the kernel can answer, and it ends the process by the signal."""
    sidecar = SidecarProcess(tmp_path, tmp_path)
    with subprocess.Popen(sidecar.command(), stderr=subprocess.PIPE) as process:
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) in (0, -signal.SIGTERM)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == []
