"""Starts engines and a sidecar for them, gives engines their turns, and reads how much memory they have."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from tests.bench.vllm.engine import Engine, Turn
from tests.server import SidecarProcess

__all__ = ["EngineProcess", "Side", "memory_bytes", "serving"]

_OFFER = ("--planes", "stream,ring,direct", "--heartbeat-seconds", "30")


@dataclass(frozen=True)
class Side:
    """How an engine gets its adapters: not at all, by vLLM's own LoRA, or by slotcar on a plane."""

    name: str
    adapters: int
    plane: str = ""

    @classmethod
    def base(cls) -> Self:
        return cls("base", 0)

    @classmethod
    def own(cls, adapters: int) -> Self:
        return cls("vllm-lora", adapters)

    @classmethod
    def slotcar(cls, plane: str, adapters: int) -> Self:
        return cls(f"slotcar {plane}", adapters, plane)


class EngineProcess:
    """An engine that has no turn sleeps. Raises AssertionError, with where its log is, when it ended."""

    def __init__(self, settings: Engine, side: Side, sidecar: SidecarProcess, threads: int) -> None:
        adapters = dict(list(settings.adapters.items())[: side.adapters])
        pid = sidecar.process.pid if side.plane and sidecar.process else None
        argument = json.dumps(asdict(replace(settings, adapters=adapters, sidecar=pid)))
        self.side = side
        self._log = Path(tempfile.mkstemp(prefix=f"slotcar-bench-{side.name.replace(' ', '-')}-", suffix=".log")[1])
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.vllm.engine", argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(side, sidecar, threads),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> Self:
        """Itself, once it can take a turn."""
        self._answer()
        return self

    def turn(self, steps: int) -> Turn:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return Turn(**json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self.side.name} ended with {self._process.wait()}; its log is {self._log}"
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        if self._process.returncode == 0:
            self._log.unlink()


@contextlib.contextmanager
def serving(settings: Engine) -> Iterator[SidecarProcess]:
    """A sidecar with a slot for each adapter and no adapter yet: the engines load what they are asked for."""
    root = Path(next(iter(settings.adapters.values()))).parent
    with (
        tempfile.TemporaryDirectory(prefix="slotcar-bench-") as folder,
        SidecarProcess(Path(folder), root, len(settings.adapters), settings.rank, _OFFER) as sidecar,
    ):
        yield sidecar


def memory_bytes(pid: int) -> int:
    """The process's anonymous pages, and its part of those in shared memory; files that it maps are not counted."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":") for line in lines if ":" in line and line.endswith("kB"))
    return sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) << 10


def _environment(side: Side, sidecar: SidecarProcess, threads: int) -> dict[str, str]:
    """What vLLM would set for its worker, were it not in the process whose steps are timed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLOTCAR_", "VLLM_"))}
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if threads > 1:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        environment["LD_PRELOAD"] = str(Path(sys.prefix) / "lib" / "libiomp5.so")
        environment["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{cores}]"
        # Threads that wait for work must not spin on the core on which the sidecar computes.
        environment["KMP_BLOCKTIME"] = "0" if side.plane == "ring" else "5"
    if side.plane:
        environment |= {"SLOTCAR_TARGET": sidecar.target, "SLOTCAR_PLANE": side.plane}
    return environment
