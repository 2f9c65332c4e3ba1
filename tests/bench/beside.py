"""What a Forward costs while 300 MB are loaded beside it: `python -m tests.bench.beside [--quick|--smoke]`.

8 rows of an adapter of rank 16 at one site of 4096 features, on each plane. Ours is with loads going on: one after the
other, each reads, verifies, hashes and fills, as its bytes are in no tier; the peer is the same without them, turn by
turn. CPU times are those of the client's and the sidecar's threads but the loaders'. Wall times say how the loads and
the Forwards share the machine's cores. `loads` in the case is how many went on beside, `waited` how many Forwards
waited for a loader, as the sidecar counts them.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from slotcar_client import Session

from tests.bench.harness import Record, Took
from tests.bench.sides import Turn, cpu_nanoseconds, in_turns, took
from tests.bench.sizes import Size, size_wanted
from tests.bench.stage import Site, Stage, adapter_weights, serving, write_adapter

FEATURES = 4096
RANK, SMALL_RANK = 64, 16
ROWS = 8
PLANES = ("stream", "ring", "direct")
BIG = ("big-0", "big-1")
MIB_PER_SITE = 2 * FEATURES * RANK * 4 >> 20
_WAITED = re.compile(r"^slotcar_forward_load_waits_total ([0-9.]+)", re.MULTILINE)


def sites(size: Size) -> list[Site]:
    return [Site(f"layers.{layer:03}.proj", FEATURES, FEATURES) for layer in range(size.pick(4, 144, 144))]


@contextlib.contextmanager
def stage(size: Size) -> Iterator[Stage]:
    """Two slots, one with the adapter "small"; memory for one big adapter, so that each load reads its files."""
    places = sites(size)
    host_mib = MIB_PER_SITE * len(places) + 16
    extra = ("--host-bytes", f"{host_mib}MiB", "--metrics", "127.0.0.1:0", "--max-adapter-bytes", "1GiB")
    with serving(places, slots=2, rank=RANK, extra=extra) as made:
        small = adapter_weights(places[:1], rank=SMALL_RANK, dtype=torch.float32, seed=0)
        made.client.load("small", write_adapter(made.root / "small", small), keep=True)
        for seed, name in enumerate(BIG, 1):
            weights = adapter_weights(places, rank=RANK, dtype=torch.float32, seed=seed)
            write_adapter(made.root / name, weights)
        yield made


class Loading:
    """A thread that loads the big adapters in turn while it is told to."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._wanted, self._begun = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.count = 0
        self.cpu_nanoseconds = 0

    def load(self, name: str) -> None:
        self._stage.client.load(name, self._stage.root / name)
        self.count += 1

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Loads go on while the context is open; after it the last has ended."""
        self._wanted.set()
        self._begun.clear()
        done = self._pool.submit(self._go)
        self._begun.wait()
        try:
            yield
        finally:
            self._wanted.clear()
            done.result()

    def _go(self) -> None:
        start = time.thread_time_ns()
        while self._wanted.is_set():
            self._begun.set()
            self.load(BIG[self.count % len(BIG)])
        self.cpu_nanoseconds += time.thread_time_ns() - start


@dataclass(frozen=True)
class Threads:
    """The sidecar's threads; `loaders` are those that a load without any Forward kept busy."""

    pid: int
    loaders: frozenset[str] = frozenset()

    def cpu_nanoseconds(self) -> dict[str, int]:
        """CPU time of each thread so far."""
        found = {}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                found[task.name] = int((task / "schedstat").read_text().split()[0])
        return found

    def without_loaders(self) -> int:
        return sum(spent for thread, spent in self.cpu_nanoseconds().items() if thread not in self.loaders)

    @classmethod
    def of(cls, stage: Stage) -> Threads:
        """Loads both big adapters at a time, so that every loader has work."""
        threads = cls(stage.pid)
        before = threads.cpu_nanoseconds()
        with ThreadPoolExecutor(len(BIG)) as pool:
            list(pool.map(lambda name: stage.client.load(name, stage.root / name, tier="host"), BIG))
        spent = {thread: now - before.get(thread, 0) for thread, now in threads.cpu_nanoseconds().items()}
        most = max(spent.values())
        return cls(stage.pid, frozenset(thread for thread, share in spent.items() if share > most / 4))


@dataclass(frozen=True)
class Forwards:
    """Calls of one session."""

    session: Session
    threads: Threads
    loading: Loading
    loads: list[int] = field(default_factory=list)

    def alone(self, calls: int) -> list[Took]:
        return self._repeated(calls)

    def beside(self, calls: int) -> list[Took]:
        before = self.loading.count
        with self.loading.going():
            times = self._repeated(calls)
        self.loads.append(self.loading.count - before)
        return times

    def _repeated(self, calls: int) -> list[Took]:
        inputs = {sites(Size.SMOKE)[0].name: torch.randn(ROWS, FEATURES)}
        walls, clock = [], time.perf_counter_ns
        cpu = self._cpu_nanoseconds()
        for _ in range(calls):
            start = clock()
            self.session.forward(inputs)
            walls.append(clock() - start)
        return took(walls, self._cpu_nanoseconds() - cpu)

    def _cpu_nanoseconds(self) -> int:
        """The thread that asks for loads waits for their answers; what it spends is not a thousandth of a load."""
        return cpu_nanoseconds(os.getpid()) + self.threads.without_loaders()


def waited(stage: Stage) -> int:
    """How many Forwards waited for a loader, as the sidecar's metrics say."""
    match = re.search(r"at=(http://\S+/metrics)", stage.sidecar.log)
    assert match is not None, stage.sidecar.log
    with urllib.request.urlopen(match[1]) as response:
        found = _WAITED.search(response.read().decode())
    assert found is not None
    return int(float(found[1]))


def run(size: Size) -> None:
    """Prints a record for each plane that there is."""
    with stage(size) as made, made.sessions("beside", PLANES) as sessions:
        threads, loading = Threads.of(made), Loading(made)
        for name in BIG:
            loading.load(name)
        for plane, session in sessions.items():
            session.set_mapping([("small", ROWS)])
            forwards = Forwards(session, threads, loading)
            calls = size.pick(5, 200, 1000)
            turns = {"alone": Turn(forwards.alone, calls), "beside": Turn(forwards.beside, calls)}
            times = in_turns(turns, size.pick(1, 3, 15))
            _print(plane, times, forwards, waited(made), size)


def _print(plane: str, times: Mapping[str, list[Took]], forwards: Forwards, waits: int, size: Size) -> None:
    case = {
        "plane": plane,
        "rows": ROWS,
        "rank": SMALL_RANK,
        "features": FEATURES,
        "mib": MIB_PER_SITE * len(sites(size)),
        "loads": sum(forwards.loads[1:]),
        "waited": waits,
    }
    Record.of("beside", case, ("slotcar", times["beside"]), ("alone", times["alone"])).printed()


def main() -> None:
    size = size_wanted(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run(size)


if __name__ == "__main__":
    main()
