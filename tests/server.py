"""A real sidecar in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import grpc

START_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass
class SidecarProcess:
    """`slotcar serve` on a unix socket in `folder`, with adapters under `root`; its log is `folder/log`."""

    folder: Path
    root: Path
    slots: int = 2
    max_rank: int = 16
    extra: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        return f"unix://{self.folder / 's.sock'}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "slotcar_sidecar", "serve"),
            *("--listen", self.target, "--root", str(self.root)),
            *("--slots", str(self.slots), "--max-rank", str(self.max_rank)),
            *("--heartbeat-seconds", "0.2", "--shutdown-seconds", "5"),
            *self.extra,
        ]

    def start(self) -> Self:
        """Starts it and returns when it answers."""
        with (self.folder / "log").open("ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | self.environment
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=environment)
        with grpc.insecure_channel(self.target.replace("unix://", "unix:")) as channel:
            ready = grpc.channel_ready_future(channel)
            for _ in range(int(START_SECONDS * 10)):
                if self.process.poll() is not None:
                    raise AssertionError(f"the sidecar ended with {self.process.returncode}:\n{self.log}")
                try:
                    ready.result(timeout=0.1)
                except grpc.FutureTimeoutError:
                    continue
                return self
        raise AssertionError(f"the sidecar did not answer:\n{self.log}")

    def kill(self) -> None:
        """kill -9, and wait for the process to be gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def again(self) -> Self:
        """A later life of it, not yet started."""
        return replace(self, process=None)

    def pause(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(STOP_SECONDS)

    def __enter__(self) -> Self:
        return self if self.process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.resume()
            self.stop()
