"""One engine of a scale run, in a process of its own: takes the next request of the trace, maps, computes, checks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import slotcar_client
import torch

from tests.scale.adapters import SITES, delta, name_of
from tests.tolerances import TOLERANCES

WAIT_SECONDS = 60.0


@dataclass
class Told:
    """What an engine did. `order` has (when a mapping was answered, the adapter's number); `wrong` says what was."""

    plane: str
    rows: int = 0
    forwards: int = 0
    order: list[tuple[float, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """What all engines do together: the trace, with the digest of each adapter by its number."""

    target: str
    trace: list[int]
    digests: list[str]


def live(pipe: Connection, work: Work, plane: str, taken: Any, seed: int) -> None:
    """Says when its session is open, begins when told, and sends a Told at the end of the trace."""
    torch.set_num_threads(1)
    generator, told = np.random.default_rng(seed), Told(plane)
    with slotcar_client.connect(work.target) as client, client.session(f"scale {plane}", transport=plane) as session:
        pipe.send(None)
        pipe.recv()
        while True:
            with taken.get_lock():
                at = taken.value
                taken.value += 1
            if at >= len(work.trace):
                break
            number = work.trace[at]
            _answer(session, told, number, work.digests[number], generator)
    pipe.send(told)


def _answer(
    session: slotcar_client.Session, told: Told, number: int, digest: str, generator: np.random.Generator
) -> None:
    rows = int(generator.integers(1, 4))
    mapping = session.set_mapping([(name_of(number), rows)], load=True, wait_seconds=WAIT_SECONDS)
    told.order.append((time.monotonic(), number))
    if mapping.entry_digests != (digest,):
        told.wrong.append(f"{name_of(number)} was mapped to {mapping.entry_digests}")
    x = generator.standard_normal((rows, next(iter(SITES.values()))[0]), np.float32)
    inputs = dict.fromkeys(SITES, torch.from_numpy(x))
    relative, absolute = TOLERANCES[torch.float32]
    told.forwards += 1
    for site, found in session.forward(inputs).items():
        close = np.isclose(found.numpy(), delta(number, site, x), rtol=relative, atol=absolute).all(axis=1)
        told.rows += rows
        told.wrong += [f"{name_of(number)} at {site}: row {row}" for row in np.flatnonzero(~close)]
