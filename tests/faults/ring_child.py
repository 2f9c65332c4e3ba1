"""Clients of the ring plane in processes of their own, to be killed and paused: `RingChild` runs `main` of this module.

What a client reached, it says as a JSON line on its standard output.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from slotcar.shm.handshake import SUFFIX
from slotcar.shm.region import ABSENT, Item, Kind

from tests.faults.child import REPOSITORY, Child, say
from tests.faults.raw import RawEngine
from tests.unit.ring.raw import RawClient, forward_request, hello
from tests.waiting import eventually

ROWS = 4
GRACE_SECONDS = 0.5
OUT = 1 << 16


class RingChild(Child):
    """Ends with its context."""

    def __init__(self, role: str, target: str, ref: str, features: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.ring_child", role, target, ref, str(features)],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


class RingEngine:
    """A session with a mapping of one adapter and a ring; `x` is its input at the first site of the model."""

    def __init__(self, engine: RawEngine, path: Path, ref: str, features: int) -> None:
        self.engine = engine
        self.client = RawClient(path, hello(engine.open(GRACE_SECONDS), arena_bytes=2 * OUT)).welcome()
        mapping = engine.map(ref)
        self.generation, self.digest = mapping.generation, mapping.entries[0].digest
        self.x = np.ones((ROWS, features), dtype=np.float32)
        self.client.put(0, self.x)

    def send(self) -> int:
        """A Forward of ROWS rows; returns its cell."""
        return self.client.send(Kind.FORWARD, forward_request(self.generation, [ROWS], [Item(0, 0, ABSENT, OUT)]))

    def forward(self, columns: int) -> np.ndarray:
        """A Forward and its result. Raises Refused."""
        cell, number = self.send(), self.client.submitted
        eventually(lambda: self.client.read(cell).sequence == number or self.client.is_gone, "an answer")
        self.client.answer(cell)
        return self.client.get(OUT, (ROWS, columns))


@contextmanager
def ring_engine(target: str, ref: str, features: int) -> Iterator[RingEngine]:
    path = Path(target.removeprefix("unix://") + SUFFIX)
    with RawEngine(target) as engine:
        made = RingEngine(engine, path, ref, features)
        with made.client:
            yield made


def pipelined(engine: RingEngine) -> None:
    """Has all of its cells submitted again and again, and looks at no answer."""
    say({"session": engine.engine.session})
    for line in sys.stdin:
        cells = [engine.send() for _ in range(int(line))]
        last, number = cells[-1], engine.client.submitted
        eventually(lambda: engine.client.read(last).sequence == number, "the last answer")  # noqa: B023
        say({"answered": number})


def flooding(engine: RingEngine) -> None:
    """Calls without end, each as soon as the one before is answered."""
    say({"session": engine.engine.session})
    while True:
        cell, number = engine.send(), engine.client.submitted
        while engine.client.read(cell).sequence != number:
            os.sched_yield()


def blocking(engine: RingEngine) -> None:
    """Makes writes to its own doorbell block, and calls."""
    doorbell = engine.client.descriptors[2]
    fcntl.fcntl(doorbell, fcntl.F_SETFL, fcntl.fcntl(doorbell, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    os.eventfd_write(doorbell, (1 << 64) - 2)
    engine.send()
    say({"session": engine.engine.session})
    sys.stdin.read()


ROLES = {role.__name__: role for role in (pipelined, flooding, blocking)}


def main() -> None:
    role, target, ref, features = sys.argv[1:]
    with ring_engine(target, ref, int(features)) as engine:
        ROLES[role](engine)


if __name__ == "__main__":
    main()
