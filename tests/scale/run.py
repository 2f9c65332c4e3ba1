"""A scale run: registers adapters with one server, lets engines ask for them, and counts."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import slotcar_client
from prometheus_client.parser import text_string_to_metric_families
from slotcar_sidecar.core.policy import Eviction

from tests.bench.hits import in_slots
from tests.bench.trace import Trace, zipf
from tests.faults.oracle import spec_file
from tests.scale import adapters
from tests.scale.engine import Told, Work, live
from tests.server import SidecarProcess

_LOADERS = 4
_JOIN_SECONDS = 60.0

Counts = Mapping[str, float]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """`host_share` of the adapters' bytes fit into memory; the others are read again when they are asked for."""

    adapters: int = 10_000
    requests: int = 20_000
    slots: int = 8
    exponent: float = 1.0
    planes: Sequence[str] = ("stream", "ring", "direct", "ring")
    host_share: float = 0.25
    eviction: Eviction = Eviction.LRU
    seed: int = 1

    def trace(self) -> list[int]:
        """The numbers of the adapters that are asked for, in order."""
        return list(islice(zipf(Random(self.seed), self.adapters, self.exponent), self.requests))


@dataclass(frozen=True)
class Outcome:
    """What engines and server told of a run. `hits` were computed by the policy alone on the same trace."""

    plan: Plan
    told: Sequence[Told]
    fills: int
    theory: float
    forwards: Mapping[str, int]
    waited: int
    seconds: float
    problems: list[str] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        return 1 - self.fills / self.plan.requests

    @property
    def rows(self) -> int:
        return sum(told.rows for told in self.told)

    @property
    def wrong(self) -> list[str]:
        return [text for told in self.told for text in told.wrong]

    @property
    def order(self) -> list[int]:
        """The adapters in the order in which their mappings were answered."""
        return [number for _, number in sorted(each for told in self.told for each in told.order)]

    def lines(self) -> Iterator[str]:
        plan = self.plan
        yield f"{plan.adapters} adapters, {plan.slots} slots, {plan.requests} requests of zipf {plan.exponent:g}"
        yield f"engines on {', '.join(plan.planes)}: {plan.requests / self.seconds:.0f} requests a second"
        yield f"rows checked {self.rows}, wrong {len(self.wrong)}"
        yield f"hit ratio {self.hit_ratio:.4f}; {plan.eviction} by itself {self.theory:.4f}"
        yield f"Forwards {dict(self.forwards)}, waited for a loader {self.waited}"

    def faults(self) -> list[str]:
        """What must not be."""
        found = [*self.wrong[:20], *self.problems]
        if self.waited:
            found.append(f"{self.waited} Forwards waited for a loader")
        if abs(self.hit_ratio - self.theory) > self.theory / 10:
            found.append(f"the hit ratio is {self.hit_ratio:.4f}, the policy's own {self.theory:.4f}")
        counted, sent = sum(self.forwards.values()), sum(told.forwards for told in self.told)
        if counted != sent:
            found.append(f"the server counted {counted} Forwards, the engines {sent}")
        return found


def run(plan: Plan, folder: Path, say: Say = lambda _: None) -> Outcome:
    """Everything is under `folder`."""
    root, home = folder / "adapters", folder / "server"
    home.mkdir(parents=True)
    for number in range(plan.adapters):
        adapters.write(root / adapters.name_of(number), number)
    say(f"wrote {plan.adapters} adapters")
    with _server(plan, home, root) as server, slotcar_client.connect(server.target) as client:
        digests = _register(client, root, plan.adapters)
        say(f"registered them: {client.capacity().host_bytes_used} bytes in memory")
        problems = [] if len(set(digests)) == plan.adapters else ["different adapters have one digest"]
        before, start = _metrics(server), time.monotonic()
        told = _ask(plan, server.target, digests)
        seconds, after = time.monotonic() - start, _metrics(server)
    trace = Trace.of("scale", plan.trace())
    forwards = {
        key.partition(" ")[2]: int(after[key] - before.get(key, 0))
        for key in after
        if key.startswith("slotcar_forwards_total OK ")
    }
    fills = after["slotcar_load_stage_seconds_count fill"] - before.get("slotcar_load_stage_seconds_count fill", 0)
    theory = in_slots(trace, plan.slots, plan.eviction).hit_ratio
    waited = int(after["slotcar_forward_load_waits_total"])
    return Outcome(plan, told, int(fills), theory, forwards, waited, seconds, problems)


@contextlib.contextmanager
def _server(plan: Plan, home: Path, root: Path) -> Iterator[SidecarProcess]:
    host_bytes = max(plan.slots * adapters.BYTES, int(plan.host_share * plan.adapters * adapters.BYTES))
    extra = (
        *("--model-spec", str(spec_file(home, adapters.SITES)), "--host-bytes", str(host_bytes)),
        *("--metrics", "127.0.0.1:0", "--eviction", str(plan.eviction)),
    )
    with SidecarProcess(home, root, slots=plan.slots, max_rank=16, extra=extra) as process:
        yield process


def _register(client: slotcar_client.Client, root: Path, count: int) -> list[str]:
    """Loads each into memory, in no slot, and returns their digests."""

    def load(number: int) -> str:
        name = adapters.name_of(number)
        return client.load(name, root / name, tier="host").digest

    with ThreadPoolExecutor(_LOADERS) as pool:
        return list(pool.map(load, range(count)))


def _ask(plan: Plan, target: str, digests: list[str]) -> list[Told]:
    """All engines at a time, until the trace is at its end."""
    context = multiprocessing.get_context("spawn")
    taken, work = context.Value("q", 0), Work(target, plan.trace(), digests)
    pipes: list[Connection] = []
    processes = []
    for number, plane in enumerate(plan.planes):
        mine, theirs = context.Pipe()
        arguments = (theirs, work, plane, taken, plan.seed + number)
        processes.append(context.Process(target=live, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(None)
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(_JOIN_SECONDS)


def _metrics(server: SidecarProcess) -> Counts:
    """Samples by their names and the values of their labels."""
    match = re.search(r"at=(http://\S+/metrics)", server.log)
    assert match is not None, server.log
    with urllib.request.urlopen(match[1]) as response:
        text = response.read().decode()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {" ".join([s.name, *(s.labels[key] for key in sorted(s.labels, reverse=True))]): s.value for s in samples}
