"""The two questions to a pool: what affinity is worth, and what engines see when a member is killed and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.scaleout.engines import Fleet, Tally, Way, fleet
from tests.scaleout.pool import NONE, Counts, Pool
from tests.waiting import eventually

RING, IN_TURN = "ring hash", "round robin"
KILLED = 1
PATIENCE_SECONDS = 180.0


@dataclass
class Hits:
    """What engines asked for in all blocks of one way, and how often the adapter was in a slot already."""

    tally: Tally = field(default_factory=Tally)
    counts: Counts = NONE

    @property
    def ratio(self) -> float:
        return self.counts.hits / (self.counts.hits + self.counts.misses)


@dataclass
class Outage:
    """One member is killed and brought back under load. `served` is what each member computed after its return."""

    by_kind: dict[str, Tally]
    served: list[float]

    @property
    def tally(self) -> Tally:
        return sum(self.by_kind.values(), Tally())


def hits(pool: Pool, engines: int, requests: int, blocks: int) -> dict[str, Hits]:
    """Both ways in turns, over the same members: `blocks` of each, in each so many requests of each engine.

    A block begins with as many requests that count for nothing, as its slots have what the other way left in them.
    Round robin is of connections, as a Service does it: a session stays where its connection went.
    """
    found = {RING: Hits(), IN_TURN: Hits()}
    ports = {RING: pool.ports.engines, IN_TURN: pool.ports.spread}
    for block in range(blocks):
        for name in (IN_TURN, RING):
            ways = [Way(ports[name])] * engines
            with fleet(pool, ways, seed=1000 * block) as running:
                _until(running, requests)
                before, seen = _sum(pool.counts()), running.least_requests
                _until(running, seen + requests)
                found[name].counts += _sum(pool.counts()) - before
            found[name].tally += _tally(running)
    return found


def outage(pool: Pool, requests: int, of_each: int = 1) -> Outage:
    """A member is killed (-9) and started again, while engines of four kinds go on, each by so many requests a time."""
    kinds = {
        f"{proxy}, {client}": Way(port, away)
        for proxy, port in (("Envoy retries", pool.ports.engines), ("Envoy does not", pool.ports.unretried))
        for client, away in (("client waits", "wait"), ("client fails", "fail"))
    }
    names = [name for name in kinds for _ in range(of_each)]
    with fleet(pool, [kinds[name] for name in names], seed=7) as running:
        _until(running, requests)
        pool.members[KILLED].kill()
        _until(running, running.least_requests + requests)
        pool.members[KILLED].start_again()
        pool.proxy.wait_until_healthy(len(pool.members))
        before = pool.counts()
        _until(running, running.least_requests + requests)
        eventually(lambda: min(_served(pool, before)) > 0, "Forwards of all members", PATIENCE_SECONDS)
        served = _served(pool, before)
    by_kind = {name: Tally() for name in kinds}
    for name, engine in zip(names, running.engines, strict=True):
        by_kind[name] += engine.tally
    return Outage(by_kind, served)


def _served(pool: Pool, before: Sequence[Counts]) -> list[float]:
    return [(now - then).forwards for now, then in zip(pool.counts(), before, strict=True)]


def _until(running: Fleet, requests: int) -> None:
    eventually(lambda: running.least_requests >= requests, f"{requests} requests of each engine", PATIENCE_SECONDS)


def _tally(running: Fleet) -> Tally:
    return sum((engine.tally for engine in running.engines), Tally())


def _sum(counts: Sequence[Counts]) -> Counts:
    return sum(counts, NONE)
