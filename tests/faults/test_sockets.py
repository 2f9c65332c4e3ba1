"""Addresses that are taken, left over, wrong or unsafe: a server serves all that it was told to, or says why not.

Exit codes: 1 for what the machine refuses, 2 for what can never be meant.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import slotcar_client
from slotcar.shm.handshake import SUFFIX

from tests.ports import free_port
from tests.server import SidecarProcess

ONE_SITE = {"sites": [{"name": "site", "in_features": 64, "out_features": 64}]}
START_SECONDS = 60


class Outcome(NamedTuple):
    code: int
    said: str


def serve(*arguments: str, seconds: float = START_SECONDS) -> Outcome:
    """Runs `slotcar serve` with exactly these arguments, which it must refuse before the time is over."""
    command = [sys.executable, "-m", "slotcar_sidecar", "serve", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds)
    assert "Traceback" not in done.stderr, done.stderr
    return Outcome(done.returncode, done.stderr.rpartition("Error: ")[2].strip())


def answers(target: str) -> str:
    """The epoch of the server that answers at `target`."""
    with slotcar_client.connect(target, timeout_seconds=30) as client:
        return client.snapshot().layout.version.epoch


def _has_ipv6_loopback() -> bool:
    try:
        free_port("::1", socket.AF_INET6)
    except OSError:
        return False
    return True


HAS_IPV6 = _has_ipv6_loopback()


class Served(NamedTuple):
    """A live server at all kinds of addresses."""

    sidecar: SidecarProcess
    port: int
    metrics_port: int
    epoch: str

    @property
    def path(self) -> Path:
        return Path(self.sidecar.target.removeprefix("unix://"))

    @property
    def tcp(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, port, metrics = tmp_path_factory.mktemp("s"), free_port(), free_port()
    extra = ["--listen", f"tcp://127.0.0.1:{port}", "--listen", "tcp://127.0.0.1:0"]
    if HAS_IPV6:
        extra += ["--listen", "tcp://[::1]:0"]
    extra += ["--metrics", f"127.0.0.1:{metrics}"]
    with SidecarProcess(folder, folder, extra=tuple(extra)) as sidecar:
        served = Served(sidecar, port, metrics, answers(sidecar.target))
        yield served
        assert sidecar.stop() == 0
        assert not served.path.exists()


@pytest.fixture(autouse=True)
def still_served(served: Served) -> Iterator[None]:
    """Whatever a test does, the first server goes on at both of its addresses."""
    yield
    assert answers(served.sidecar.target) == answers(served.tcp) == served.epoch


def test_a_second_server_on_one_socket_is_refused(served: Served) -> None:
    """Also while the first is only stopped, and so does not answer.

    To see it fail: leave out the lock in sockets.claimed; gRPC takes over a live server's socket in silence.
    """
    served.sidecar.pause()
    try:
        code, said = serve("--listen", served.sidecar.target)
    finally:
        served.sidecar.resume()
    assert (code, str(served.path) in said) == (1, True), said
    assert served.path.is_socket()


def test_a_second_server_through_a_link_to_the_folder_is_refused(served: Served, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(served.path.parent)
    other = tmp_path / "link" / served.path.name
    code, said = serve("--listen", f"unix://{other}")
    assert (code, str(other) in said) == (1, True), said


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_second_server_on_one_port_is_refused(served: Served, host: str) -> None:
    """A name may lead to several addresses: one of them taken is the port taken."""
    try:
        code, said = serve("--listen", f"tcp://{host}:{served.port}", seconds=10)
    except subprocess.TimeoutExpired:
        pytest.fail(f"a second server serves tcp://{host}:{served.port}, beside the first")
    assert (code, f"{host}:{served.port}" in said) == (1, True), said


def test_a_metrics_port_in_use_is_refused(served: Served, tmp_path: Path) -> None:
    socket_path = tmp_path / "s.sock"
    code, said = serve("--listen", f"unix://{socket_path}", "--metrics", f"127.0.0.1:{served.metrics_port}")
    assert (code, str(served.metrics_port) in said) == (1, True), said
    assert not socket_path.exists()


def test_what_is_no_socket_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious", encoding="utf-8")
    code, said = serve("--listen", f"unix://{tmp_path}/file")
    assert (code, f"{tmp_path}/file" in said) == (1, True), said
    assert (tmp_path / "file").read_text(encoding="utf-8") == "precious"


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    code, said = serve("--listen", f"unix://{tmp_path}/nowhere/s.sock", "--host-bytes", "1GiB")
    assert (code, f"{tmp_path}/nowhere" in said) == (1, True), said
    assert not (tmp_path / "nowhere").exists()


def test_a_socket_is_for_its_owner_and_group(served: Served) -> None:
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o660


def test_a_dead_servers_socket_is_taken_over(tmp_path: Path) -> None:
    """To see it fail: do not unlink in sockets._remove_dead_socket."""
    with SidecarProcess(tmp_path, tmp_path) as sidecar:
        first = answers(sidecar.target)
        path = Path(sidecar.target.removeprefix("unix://"))
        sidecar.kill()
        assert path.is_socket()
        sidecar.start()
        assert answers(sidecar.target) != first
        assert "took over" in sidecar.log


def test_a_socket_has_the_name_that_was_asked_for(tmp_path: Path) -> None:
    """Characters that mean something in a URI mean nothing in a path."""
    names = ("s#1.sock", "s?x.sock", "s%41.sock", "s é.sock")
    listen = [argument for name in names for argument in ("--listen", f"unix://{tmp_path}/{name}")]
    with SidecarProcess(tmp_path, tmp_path, extra=tuple(listen)) as sidecar:
        sockets = {path.name for path in tmp_path.iterdir() if path.is_socket()}
        assert sockets == {f"{name}{suffix}" for name in (*names, "s.sock") for suffix in ("", SUFFIX)}
        assert {answers(f"unix://{tmp_path}/{name}") for name in names} == {answers(sidecar.target)}


def test_a_port_that_the_system_chooses_is_said(served: Served) -> None:
    chosen = re.findall(r"tcp://\S+:[1-9]\d*", served.sidecar.log.rpartition(" serving ")[2])
    assert len(chosen) == 2 + HAS_IPV6, served.sidecar.log
    assert {answers(target) for target in chosen} == {served.epoch}


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6 loopback")
def test_a_second_server_on_one_ipv6_port_is_refused(served: Served) -> None:
    found = re.search(r"tcp://(\[::1\]:[1-9]\d*)", served.sidecar.log)
    assert found is not None, served.sidecar.log
    code, said = serve("--listen", found[0])
    assert (code, found[1] in said) == (1, True), said


class OnIpv6Only(SidecarProcess):
    """A sidecar on a machine whose only address beyond loopback is an IPv6 one, as pods of some clusters have it."""

    def command(self) -> list[str]:
        network = "ip link set lo up && ip -6 addr add fd00::5/128 dev lo"
        return ["unshare", "--net", "--map-root-user", "sh", "-c", f'{network} && exec "$@"', "sh", *super().command()]


def _can_unshare() -> bool:
    trial = ["unshare", "--net", "--map-root-user", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(trial, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _can_unshare(), reason="no network namespaces here")
def test_loopback_is_there_whatever_the_other_addresses_are(tmp_path: Path) -> None:
    """To see it fail: resolve with AI_ADDRCONFIG, for which loopback is no address."""
    listen = ("--listen", "tcp://127.0.0.1:0", "--listen", "tcp://[::1]:0", "--listen", "tcp://localhost:0")
    with OnIpv6Only(tmp_path, tmp_path, extra=listen) as sidecar:
        assert answers(sidecar.target)


def test_a_model_that_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Not with a traceback; and nothing is bound."""
    (tmp_path / "spec.json").write_text(json.dumps(ONE_SITE), encoding="utf-8")
    path = tmp_path / "s.sock"
    fits_not = ("--model-spec", str(tmp_path / "spec.json"), "--device-bytes", "1024")
    code, said = serve("--listen", f"unix://{path}", *fits_not)
    assert (code, "slots" in said) == (1, True), said
    assert not path.exists()


WRONG_USAGE = {
    "a path too long": (("--listen", f"unix:///tmp/{'x' * 103}"), "107 bytes"),
    "a path too long for two sockets": (("--listen", f"unix:///tmp/{'x' * 99}"), "103 bytes"),
    "an unknown plane": (("--planes", "stream,rings"), "direct"),
    "no stream": (("--planes", "ring,direct"), "stream"),
    "a ring beyond the layout": (("--ring-bytes", "5GiB"), "--ring-bytes"),
    "a relative path": (("--listen", "unix://s.sock"), "unix:///path"),
    "no scheme": (("--listen", "/tmp/s.sock"), "unix:///path"),
    "no port": (("--listen", "tcp://127.0.0.1"), "tcp://host:port"),
    "a port too large": (("--listen", "tcp://127.0.0.1:65536"), "tcp://host:port"),
    "every address without --insecure": (("--listen", "tcp://0.0.0.0:0"), "--insecure"),
    "every IPv6 address without --insecure": (("--listen", "tcp://[::]:0"), "--insecure"),
    "a name without --insecure": (("--listen", "tcp://example.invalid:1"), "--insecure"),
    "one bad address of two": (("--listen", "unix:///tmp/s.sock", "--listen", "tcp://10.0.0.1:1"), "--insecure"),
    "an unknown dtype": (("--dtype", "int8"), "bfloat16"),
    "an unknown device": (("--device", "tpu"), "cpu"),
    "an unknown log format": (("--log-format", "xml"), "json"),
    "no slots": (("--slots", "0"), "more than 0"),
    "fewer than no slots": (("--slots", "-2"), "more than 0"),
    "a negative rank": (("--max-rank", "-1"), "more than 0"),
    "a negative size": (("--host-bytes", "-1"), "--host-bytes"),
    "a negative time": (("--shutdown-seconds", "-1"), "more than 0"),
    "a time that is none": (("--heartbeat-seconds", "nan"), "more than 0"),
    "a number that is none": (("--slots", "many"), "--slots"),
    "a root that does not exist": (("--root", "/nonexistent"), "/nonexistent"),
    "metrics without a port": (("--metrics", "127.0.0.1"), "metrics"),
    "health without a port": (("--health", "127.0.0.1"), "health"),
    "an unknown flag": (("--slot", "1"), "--slot"),
}


@pytest.mark.parametrize("case", WRONG_USAGE, ids=list(WRONG_USAGE))
def test_wrong_usage_is_exit_code_2(case: str) -> None:
    arguments, wanted = WRONG_USAGE[case]
    code, said = serve(*arguments)
    assert (code, wanted in said) == (2, True), said


def test_a_variable_counts_as_its_flag(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slotcar_sidecar", "serve"]
    environment = os.environ | {"SLOTCAR_LISTEN": "tcp://0.0.0.0:0"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=START_SECONDS)
    assert (done.returncode, "--insecure" in done.stderr) == (2, True), done.stderr
