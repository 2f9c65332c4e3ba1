"""One client process of a soak, to be killed and stopped: two engines and an operator, each with a seed of its own.

python -m tests.soak.client RUN_FOLDER NUMBER TARGET
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from tests.soak.actor import World
from tests.soak.engine import Engine
from tests.soak.operator import Operator
from tests.soak.plan import ADAPTERS, Plan, Pools
from tests.soak.records import Journal

END_SECONDS = 20.0
"""An actor that is told to end ends within this time, whatever call it waits for."""

STUCK = 78


def main() -> None:
    """Acts until SIGTERM, and ends at once when an actor has a fault of its own."""
    folder, number, target = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    journal = Journal(folder / f"c{number}")
    world = World(target, Plan.read(folder), folder / ADAPTERS, Pools.read(folder), journal)
    signal.signal(signal.SIGTERM, lambda *_: world.over.set())
    actors = [Engine(world, f"{number}.1"), Engine(world, f"{number}.2"), Operator(world, f"{number}.3")]
    threads = [threading.Thread(target=actor.run, daemon=True) for actor in actors]
    for thread in threads:
        thread.start()
    while not world.over.wait(0.2):
        if not all(thread.is_alive() for thread in threads):
            break
    world.over.set()
    deadline = time.monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [actor.name for actor, thread in zip(actors, threads, strict=True) if thread.is_alive()]
    if stuck and not world.pulse.stopped_since(deadline - END_SECONDS):
        journal.append("fault", {"why": f"actors {stuck} did not end in {END_SECONDS:g} s"})
    # Not through the interpreter's end, which would wait for gRPC's threads.
    os._exit(STUCK if stuck else 0)


if __name__ == "__main__":
    main()
