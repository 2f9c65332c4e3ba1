"""Health alone, as a kubelet asks for it: from the first moment to the last, and whatever else connects."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
import slotcar_client
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from slotcar.v1 import adapter_service_pb2, adapter_service_pb2_grpc, operator_service_pb2, operator_service_pb2_grpc

from tests.faults.mute import is_full, mute_client
from tests.server import START_SECONDS, SidecarProcess
from tests.waiting import PATIENCE_SECONDS, eventually

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
HEALTH = ("--health", "127.0.0.1:0")
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


class Probe:
    """Asks the health port of a server, which the server's log names."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        eventually(lambda: self._found(sidecar), "the health port", START_SECONDS)
        found = self._found(sidecar)
        assert found is not None
        self.host, self.port = found[1], int(found[2])
        self.channel = grpc.insecure_channel(
            f"{self.host}:{self.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub = health_pb2_grpc.HealthStub(self.channel)

    @staticmethod
    def _found(sidecar: SidecarProcess) -> re.Match[str] | None:
        return re.search(r" health .*at=tcp://(\S+):(\d+)", sidecar.log)

    def check(self, service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(self._stub.Check(request, timeout=PATIENCE_SECONDS, wait_for_ready=True).status)

    def all(self) -> tuple[int, int, int]:
        return self.check("liveness"), self.check("readiness"), self.check("")

    @contextmanager
    def watch(self, service: str) -> Iterator[Iterator[int]]:
        call = self._stub.Watch(health_pb2.HealthCheckRequest(service=service))
        yield (response.status for response in call)
        call.cancel()


@pytest.fixture
def probe(start_sidecar: Callable[..., SidecarProcess], tmp_path: Path) -> Iterator[tuple[SidecarProcess, Probe]]:
    sidecar = start_sidecar(tmp_path, extra=HEALTH)
    probe = Probe(sidecar)
    yield sidecar, probe
    probe.channel.close()


@contextmanager
def held_up(tmp_path: Path, *extra: str) -> Iterator[tuple[SidecarProcess, subprocess.Popen[bytes], int]]:
    """A server whose start-up waits for the lock of its disk tier, and the lock's descriptor."""
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    lock = os.open(disk / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    sidecar = SidecarProcess(tmp_path, tmp_path, extra=(*HEALTH, "--disk", str(disk), *extra))
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(sidecar.command(), stdout=log, stderr=log) as process:
        try:
            yield sidecar, process, lock
        finally:
            process.kill()
            os.close(lock)


def test_a_start_that_takes_long_is_alive_and_not_ready(tmp_path: Path) -> None:
    """And nothing but health is there: a startupProbe asks for liveness. Then the server is ready."""
    with held_up(tmp_path) as (sidecar, process, lock):
        probe = Probe(sidecar)
        assert probe.all() == (SERVING, NOT_SERVING, NOT_SERVING)
        with probe.watch("readiness") as ready:
            assert next(ready) == NOT_SERVING
            assert " serving " not in sidecar.log
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert next(ready) == SERVING
        with slotcar_client.connect(sidecar.target) as client:
            assert client.settings().state == "waiting_for_model"
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0, sidecar.log


@SIGNALS
def test_a_start_that_hangs_ends_at_once(tmp_path: Path, number: int) -> None:
    """SIGHUP does it no harm, and a second signal neither. To see it fail: open the folder on the event loop."""
    with held_up(tmp_path) as (sidecar, process, _):
        probe = Probe(sidecar)
        process.send_signal(signal.SIGHUP)
        assert probe.all() == (SERVING, NOT_SERVING, NOT_SERVING)
        process.send_signal(number)
        with suppress(ProcessLookupError):
            process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == 0, sidecar.log
        assert "stopped" in sidecar.log
        assert "Traceback" not in sidecar.log
        assert not Path(sidecar.target.removeprefix("unix://")).exists()


def test_nothing_else_is_there(probe: tuple[SidecarProcess, Probe]) -> None:
    """No service of slotcar, and no reflection."""
    channel = probe[1].channel
    capacity = adapter_service_pb2_grpc.AdapterServiceStub(channel).GetCapacity
    end = operator_service_pb2_grpc.OperatorServiceStub(channel).Shutdown
    for call, request in (
        (capacity, adapter_service_pb2.GetCapacityRequest()),
        (end, operator_service_pb2.ShutdownRequest()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=PATIENCE_SECONDS)  # type: ignore[operator]
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as caught:
        list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([question]), timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as caught:
        probe[1].check("other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_it_tells_of_the_end_until_the_end(probe: tuple[SidecarProcess, Probe]) -> None:
    """Sessions are waited for, probes are not: a watch of theirs holds nothing up."""
    sidecar, asked = probe
    assert sidecar.process is not None
    assert asked.all() == (SERVING,) * 3
    with (
        slotcar_client.connect(sidecar.target) as client,
        client.session("idle"),
        asked.watch("readiness") as ready,
        asked.watch("liveness") as live,
    ):
        assert (next(ready), next(live)) == (SERVING, SERVING)
        sidecar.process.terminate()
        assert next(ready) == NOT_SERVING
        assert list(live) == []  # it stays SERVING, and ends well
    assert sidecar.process.wait(PATIENCE_SECONDS) == 0, sidecar.log
    assert "takes nothing" not in sidecar.log


def test_it_outlives_the_server_itself(probe: tuple[SidecarProcess, Probe]) -> None:
    """Also while the server's connections are being closed, which a client that reads nothing holds up for seconds."""
    sidecar, asked = probe
    assert sidecar.process is not None
    with mute_client(sidecar.target.removeprefix("unix://")) as peer, asked.watch("liveness") as live:
        assert next(live) == SERVING
        eventually(lambda: is_full(peer), "a full socket")
        with slotcar_client.connect(sidecar.target) as client:
            client.shut_down(0.0)
        eventually(lambda: "shutting down" in sidecar.log, "the end")
        assert asked.all() == (SERVING, NOT_SERVING, NOT_SERVING)
        assert list(live) == []
    assert sidecar.process.wait(PATIENCE_SECONDS) == 0, sidecar.log
    assert "takes nothing of what was sent" in sidecar.log


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000 04 00 00000000")
PING = bytes.fromhex("000008 06 00 00000000") + b"12345678"
HEADERS, CONTINUATION = (bytes.fromhex(f"004000 {kind} 00 00000001") + bytes(1 << 14) for kind in ("01", "09"))
HOSTILE = {
    "nothing": b"",
    "no HTTP/2": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 64,
    "half a preface": PREFACE[:20],
    "a frame that is too large": PREFACE + bytes.fromhex("ffffff 00 00 00000001") + bytes(1000),
    "a flood of settings": PREFACE + SETTINGS * 10_000,
    "a flood of pings": PREFACE + SETTINGS + PING * 10_000,
    "headers without end": PREFACE + SETTINGS + HEADERS + CONTINUATION * 20,
}


def test_hostile_clients_are_nothing_to_the_others(probe: tuple[SidecarProcess, Probe]) -> None:
    """They stay connected, and the end waits for none of them."""
    sidecar, asked = probe
    assert sidecar.process is not None
    with ExitStack() as stack:
        for sent in HOSTILE.values():
            for _ in range(5):
                peer = stack.enter_context(socket.create_connection((asked.host, asked.port), timeout=PATIENCE_SECONDS))
                with suppress(OSError):
                    peer.sendall(sent)
            assert asked.all() == (SERVING,) * 3
        with slotcar_client.connect(sidecar.target) as client:
            assert client.capacity().sessions == 0
        assert sidecar.stop() == 0, sidecar.log
    assert "Traceback" not in sidecar.log


def test_it_may_be_on_any_address(start_sidecar: Callable[..., SidecarProcess], tmp_path: Path) -> None:
    """Without --insecure, as nothing but health is there."""
    probe = Probe(start_sidecar(tmp_path, extra=("--health", "0.0.0.0:0")))
    assert probe.all() == (SERVING,) * 3


def test_a_port_in_use_is_refused(probe: tuple[SidecarProcess, Probe], tmp_path: Path) -> None:
    other = SidecarProcess(tmp_path, tmp_path, extra=("--health", f"127.0.0.1:{probe[1].port}"))
    with pytest.raises(AssertionError, match=f"ended with 1:[^$]*{probe[1].port}"):
        other.start()
    assert "Traceback" not in other.log
