"""A sidecar in a process of its own that ends by kill -9 at a named point: `python -m tests.unit.client.ring.child`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from slotcar.shm import region

from tests.unit.client.fake_engine import A, B, FakeServer
from tests.unit.client.ring.fake_ring import FakeRing, RingEngine
from tests.waiting import eventually

# Of a connection, and of its first Forward.
POINTS = ("hello", "offer", "before", "reply", "written", "rung")


def die_at(ring: FakeRing, point: str) -> None:
    def die(*about: Any) -> Any:
        if about != (region.Kind.FORWARD,) and point in ("before", "written", "rung"):
            return None
        if point == "reply" and ring.kinds[-1] != region.Kind.FORWARD:
            return None
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(ring, point, die)


def serve(folder: str, point: str) -> None:
    engine = RingEngine(sql=A, chat=B)
    engine.epoch = os.urandom(8).hex()
    with FakeServer(Path(folder), engine) as server, FakeRing(server.target, engine) as ring:
        if point in POINTS:
            die_at(ring, point)
        print("ready", flush=True)
        sys.stdin.read()


class Child:
    """The process; it can be started again on the same sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = f"unix://{folder}/f.sock"
        self.process: subprocess.Popen[str] | None = None

    def start(self, point: str = "nowhere") -> Self:
        for left in self.folder.glob("f.sock*"):
            left.unlink()
        command = [sys.executable, "-m", "tests.unit.client.ring.child", str(self.folder), point]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP; returns when it has stopped."""
        assert self.process is not None
        self.send(signal.SIGSTOP)
        state = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T")

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            with self.process:
                self.process.wait(30)


if __name__ == "__main__":
    serve(*sys.argv[1:])
