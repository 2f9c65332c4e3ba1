"""Engines that use the pool: threads with one client per adapter, which choose adapters by zipf's law.

Every row that a member computed is computed again here, in float64 and by the digest that the adapter's name has, so
that neither a wrong adapter nor a wrong mapping can pass.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from slotcar_client import Client, Session, SlotcarError, connect

from tests.scaleout.configuration import LOOPBACK
from tests.scaleout.pool import SITES, Pool

ROWS = 3
FORWARDS = 2
WAIT_SECONDS = 20.0
EXPONENT = 0.9


@dataclass
class Tally:
    """What one engine, or several, saw."""

    requests: int = 0
    answered: int = 0
    rows: int = 0
    wrong_rows: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.requests + other.requests,
            self.answered + other.answered,
            self.rows + other.rows,
            self.wrong_rows + other.wrong_rows,
            self.errors + other.errors,
            self.recoveries + other.recoveries,
        )


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine reaches the pool, and whether its client waits for a member that is away."""

    port: int
    away: str = "wait"


class Engine:
    """One engine: a session at the pool for each adapter that it has used, and a request at a time."""

    def __init__(self, pool: Pool, way: Way, seed: int) -> None:
        self.tally = Tally()
        self._pool = pool
        self._way = way
        self._choice = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._names = tuple(pool.digests)
        self._weights = tuple(accumulate(zipf(len(self._names))))
        self._clients: dict[str, Client] = {}
        self._sessions: dict[str, Session] = {}

    def request(self) -> None:
        """Maps one adapter, computes some rows with it, and gives the mapping back. Errors are counted."""
        (name,) = self._choice.choices(self._names, cum_weights=self._weights)
        self.tally.requests += 1
        try:
            self._serve(name)
        except SlotcarError as error:
            self.tally.errors[error.reason or type(error).__name__] += 1
        else:
            self.tally.answered += 1

    def _serve(self, name: str) -> None:
        session = self._session(name)
        session.set_mapping([(name, ROWS)], load=True, wait_seconds=WAIT_SECONDS)
        for _ in range(FORWARDS):
            inputs = {site: torch.randn(ROWS, size, generator=self._generator) for site, (size, _) in SITES.items()}
            outputs = session.forward(inputs)
            self._check(name, inputs, outputs)
        session.release_mapping()

    def _check(self, name: str, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
        digest = self._pool.digests[name]
        for site, x in inputs.items():
            wrong = self._pool.library.wrong_rows([digest], [ROWS], site, x, outputs[site])
            self.tally.rows += ROWS
            self.tally.wrong_rows += len(wrong)

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            if name not in self._clients:
                target, credentials = f"{LOOPBACK}:{self._way.port}", self._pool.credentials
                self._clients[name] = connect(target, timeout_seconds=30, credentials=credentials, affinity=name)
            self._sessions[name] = self._clients[name].session(
                "engine", transport="stream", grace_seconds=1, away=self._way.away
            )
        return self._sessions[name]

    def close(self) -> None:
        for session in self._sessions.values():
            self.tally.recoveries.update(session.recoveries)
        for client in self._clients.values():
            client.close()


def zipf(count: int) -> Iterator[float]:
    """How often each of `count` adapters is asked for, up to a factor."""
    return (1 / rank**EXPONENT for rank in range(1, count + 1))


class Fleet:
    """Engines that go on, each in a thread of its own, until `stop`."""

    def __init__(self, pool: Pool, ways: Sequence[Way], seed: int) -> None:
        self.engines = [Engine(pool, way, seed + number) for number, way in enumerate(ways)]
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(engine,)) for engine in self.engines]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Returns when each engine has ended its last request. Raises what one of them failed with."""
        for thread in self._threads:
            thread.join()
        for engine in self.engines:
            engine.close()
        if self.failures:
            raise self.failures[0]

    def stop(self) -> None:
        self._stop.set()

    @property
    def least_requests(self) -> int:
        """Of the engine that has made the fewest; it has given up if it failed."""
        if self.failures:
            raise self.failures[0]
        return min(engine.tally.requests for engine in self.engines)

    def _run(self, engine: Engine) -> None:
        try:
            while not self._stop.is_set():
                engine.request()
        except BaseException as error:
            self.failures.append(error)


@contextmanager
def fleet(pool: Pool, ways: Sequence[Way], seed: int) -> Iterator[Fleet]:
    """Engines that run for as long as the block."""
    found = Fleet(pool, ways, seed)
    with ExitStack() as stack:
        stack.callback(found.join)
        stack.callback(found.stop)
        found.start()
        yield found
