"""The processes that a soak starts, hurts and ends: one server after the other, and clients. All by their pids."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from slotcar.v1 import adapter_service_pb2

from tests.faults.oracle import spec_file
from tests.faults.raw import RawEngine
from tests.server import SidecarProcess
from tests.soak.engine import VANISHED
from tests.soak.plan import ADAPTERS, MAX_RANK, SITES, SLOTS

REPOSITORY = Path(__file__).resolve().parents[2]
END_SECONDS = 60.0
HOST_BYTES = 768 << 10
"""Less than all adapters have, so that bytes leave memory and are read again."""

_FAULTS = re.compile(r"fault in |Traceback|never retrieved|was destroyed|Fatal|Segmentation")
_MOST_LINES = 20


@dataclass
class Life:
    """One life of the server."""

    epoch: str
    rss: list[tuple[float, int]] = field(default_factory=list)


class Server:
    """The server, always with the same flags and the same socket. `faults` are lines of its logs that must not be.

    `ends` has when it was told to end, and when it had ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "server"
        self.folder.mkdir()
        extra = (
            *("--model-spec", str(spec_file(self.folder, SITES)), "--host-bytes", str(HOST_BYTES)),
            *("--mapping-idle-seconds", "0.8", "--compute-threads", "2"),
        )
        self.process = SidecarProcess(self.folder, folder / ADAPTERS, slots=SLOTS, max_rank=MAX_RANK, extra=extra)
        self.lives: list[Life] = []
        self.faults: list[str] = []
        self.ends: list[tuple[float, float]] = []
        self.is_stopped = False

    @property
    def target(self) -> str:
        return self.process.target

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def start(self) -> None:
        self.process.start()
        with RawEngine(self.target) as wire:
            answer = wire.adapters.GetCapacity(adapter_service_pb2.GetCapacityRequest(), timeout=END_SECONDS)
        self.lives.append(Life(answer.layout.epoch))

    @property
    def is_running(self) -> bool:
        return self.process.process is not None and self.process.process.poll() is None

    def pause(self) -> None:
        self.process.pause()
        self.is_stopped = True

    def resume(self) -> None:
        self.process.resume()
        self.is_stopped = False

    def kill(self) -> None:
        self.process.kill()
        self.is_stopped = False
        self._end_log()

    def stop(self) -> None:
        """SIGTERM; it must end in time, and well."""
        self.resume()
        start = time.monotonic()
        try:
            code = self.process.stop()
        except subprocess.TimeoutExpired:
            self.faults.append(f"life {len(self.lives)} did not end after SIGTERM")
            self.process.kill()
        else:
            if code:
                self.faults.append(f"life {len(self.lives)} ended with {code} after SIGTERM")
        self.ends.append((start, time.monotonic()))
        self._end_log()

    def check(self) -> None:
        """Records an end that nobody asked for."""
        if self.process.process is not None and self.process.process.poll() is not None:
            self.faults.append(f"life {len(self.lives)} ended by itself with {self.process.process.returncode}")
            self._end_log()

    def _end_log(self) -> None:
        """Looks through the log of the life that ended; the logs of the last two lives stay."""
        path, before = self.folder / "log", self.folder / "log.before"
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if _FAULTS.search(line) and len(self.faults) < _MOST_LINES:
                    self.faults.append(f"log of life {len(self.lives)}: {line.strip()[:300]}")
        path.replace(before)


class Client:
    """One client process, with its records in `folder`."""

    def __init__(self, run_folder: Path, number: int, target: str) -> None:
        self.folder = run_folder / f"c{number}"
        self.folder.mkdir()
        self.name = self.folder.name
        self.stop_until: float | None = None
        self.told_at: float | None = None
        with (self.folder / "stderr").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.client", str(run_folder), str(number), target],
                cwd=REPOSITORY,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )

    @property
    def is_dead(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(END_SECONDS)

    def terminate(self, now: float) -> None:
        self.process.terminate()
        self.told_at = now

    def pause(self, until: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.stop_until = until

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.stop_until = None

    def fault(self) -> str:
        """What is wrong with how it ended by itself; "" if nothing is."""
        if self.process.returncode in (0, VANISHED):
            return ""
        tail = (self.folder / "stderr").read_text(encoding="utf-8", errors="replace")[-1500:]
        return f"{self.name} ended with {self.process.returncode}: {tail}"

    def end(self) -> None:
        """kill -9, if it still runs."""
        if not self.is_dead:
            self.kill()
