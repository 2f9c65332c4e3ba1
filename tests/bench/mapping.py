"""What SetMapping of 256 entries costs: `python -m tests.bench.mapping [--quick|--smoke]`.

Ours is with 100,000 registered adapters and the peer is the same with 10, so that the ratio says whether their number
matters. Entries are of 8 resident adapters, in another order at each call, as batches are. `core` is the cache on an
event loop, with a task for each call; `messages` is the same from the request's message to the answer's; what has the
name of a plane is the whole call of the public client. CPU times are those of both processes; `sidecar_cpu_us` in the
case is what the sidecar has of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from slotcar.v1 import engine_service_pb2
from slotcar_client import Session, protocol
from slotcar_client.entries import parse_entries
from slotcar_client.protocol import MappingWish
from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.calls import LoadCall, MappingCall
from slotcar_sidecar.core.events import EventLog
from slotcar_sidecar.core.ids import AdapterRef, Epoch, SessionId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.ports import Environment, Limits
from slotcar_sidecar.core.residency import Residency
from slotcar_sidecar.core.session import Sessions, SessionTerms
from slotcar_sidecar.rpc import convert
from slotcar_sidecar.store.disk.tier import NoDisk
from slotcar_sidecar.store.host import HostTierLru
from slotcar_sidecar.store.tiers import StoreTiers

from tests.bench.harness import Record, Took
from tests.bench.registered import register
from tests.bench.sides import Side, Turn, cpu_nanoseconds, in_turns, repeated, took
from tests.bench.sizes import Size, size_wanted
from tests.bench.stage import Site, Stage, adapter_weights, serving, write_adapter
from tests.fakes.parts import MODEL, FakeDevice, FakeSource, InlineExecutor, SilentObserver

ENTRIES = 256
RESIDENT = 8
FEW, MANY = 10, 100_000
PLANES = ("stream", "ring")
RANK = 16
NAMES = tuple(f"resident-{number}" for number in range(RESIDENT))
SITE = Site("layer.proj", 16, 16)
_ORDERS = 8

Call = Callable[[], Coroutine[Any, Any, object]]


def batches(entries: int = ENTRIES) -> list[list[str]]:
    """The same entries in some orders."""
    names = [NAMES[index % RESIDENT] for index in range(entries)]
    shuffled = random.Random(0)
    return [shuffled.sample(names, len(names)) for _ in range(_ORDERS)]


# In this process


class Core:
    """A cache over stand-ins for files and device, with a session."""

    def __init__(self, loop: asyncio.AbstractEventLoop, registered: int) -> None:
        self._loop = loop
        self._cache = register(_make_cache(), registered - RESIDENT)
        loop.run_until_complete(self._load())
        self._session = self._cache.open_session(SessionTerms("bench"), None).session_id

    async def _load(self) -> None:
        for name in NAMES:
            await self._cache.load(LoadCall(AdapterRef.parse(name), f"/adapters/{name}"))

    def core(self) -> Side:
        """The cache alone."""
        calls = cycle([MappingCall(self._session, 1, convert.to_refs(request)) for request in self._requests()])
        return self._side(lambda: self._cache.set_mapping(next(calls)))

    def messages(self) -> Side:
        """From the bytes of a request to those of its answer."""
        requests = cycle([request.SerializeToString() for request in self._requests()])
        return self._side(lambda: self._answer(next(requests)))

    def _requests(self) -> list[engine_service_pb2.SetMappingRequest]:
        wishes = [MappingWish(1, parse_entries(batch)) for batch in batches()]
        return [protocol.mapping_request(str(self._session), wish) for wish in wishes]

    def _side(self, call: Call) -> Side:
        return lambda calls: self._loop.run_until_complete(_as_tasks(call, calls))

    async def _answer(self, data: bytes) -> bytes:
        request = engine_service_pb2.SetMappingRequest.FromString(data)
        call = MappingCall(SessionId(request.session), request.mapping_id, convert.to_refs(request))
        mapping = await self._cache.set_mapping(call)
        return convert.from_mapping(mapping, request, self._cache.layout).SerializeToString()


async def _as_tasks(call: Call, calls: int) -> list[Took]:
    loop, walls, clock = asyncio.get_running_loop(), [], time.perf_counter_ns
    cpu = cpu_nanoseconds(os.getpid())
    for _ in range(calls):
        start = clock()
        await loop.create_task(call())
        walls.append(clock() - start)
    return took(walls, cpu_nanoseconds(os.getpid()) - cpu)


def _make_cache() -> AdapterCache:
    source = FakeSource({f"/adapters/{name}": name for name in NAMES})
    pool, observer, host = InlineExecutor(), SilentObserver(), HostTierLru(1 << 20)
    numbers = iter(range(1 << 30))
    environment = Environment(pool, pool, pool, time.monotonic, lambda: str(next(numbers)), observer)
    tiers = StoreTiers(source, host, NoDisk(), environment, 1 << 20)
    cache = AdapterCache(
        Residency(Layout.empty(Epoch("bench"), RESIDENT), EventLog(time.time), tiers.forget, MANY),
        Sessions(max_sessions=8, max_mappings=8),
        tiers,
        FakeDevice(RESIDENT),
        environment,
        Limits(
            1 << 40,
            max_entries=4096,
            max_rows=1 << 20,
            max_response_bytes=1 << 20,
            max_holds=8,
            mapping_idle_seconds=30.0,
        ),
    )
    cache.adopt_model(MODEL)
    return cache


def measure_core(size: Size) -> None:
    """Prints the records of `core` and `messages`."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        few, many = Core(loop, FEW), Core(loop, _many(size))
        for work, side in (("core", Core.core), ("messages", Core.messages)):
            calls = size.pick(2, 100, 200)
            turns = {"few": Turn(side(few), calls), "many": Turn(side(many), calls)}
            _record(size, work, in_turns(turns, size.pick(1, 15, 40)))


# In another process


@contextlib.contextmanager
def sidecar_with(registered: int) -> Iterator[Stage]:
    """A sidecar with so many registered adapters, of which some are resident."""
    program = ("tests.bench.registered", str(registered - RESIDENT))
    with serving([SITE], slots=RESIDENT, rank=RANK, program=program) as stage:
        for number, name in enumerate(NAMES):
            weights = adapter_weights([SITE], rank=RANK, dtype=torch.float32, seed=number)
            stage.client.load(name, write_adapter(stage.root / name, weights))
        yield stage


@dataclass(frozen=True)
class Watched:
    """The calls of a session; `sidecar_us` has what one of them took of the sidecar's CPU time, for each turn."""

    session: Session
    pid: int
    sidecar_us: list[float] = field(default_factory=list)

    def __call__(self, calls: int) -> list[Took]:
        orders = cycle(batches())
        before = cpu_nanoseconds(self.pid)
        times = repeated(lambda: self.session.set_mapping(next(orders)), [self.pid])(calls)
        self.sidecar_us.append((cpu_nanoseconds(self.pid) - before) / calls / 1e3)
        return times


def measure_planes(size: Size) -> None:
    """Prints a record for each plane that carries SetMapping."""
    with contextlib.ExitStack() as stack:
        stages = [stack.enter_context(sidecar_with(count)) for count in (FEW, _many(size))]
        sessions = [stack.enter_context(stage.sessions("mapping", PLANES)) for stage in stages]
        for plane in sessions[0]:
            few, many = (Watched(each[plane], stage.pid) for each, stage in zip(sessions, stages, strict=True))
            calls = size.pick(2, 100, 200)
            times = in_turns({"few": Turn(few, calls), "many": Turn(many, calls)}, size.pick(1, 15, 40))
            _record(size, plane, times, round(statistics.median(many.sidecar_us), 1))


def _many(size: Size) -> int:
    return size.pick(FEW + 10, MANY, MANY)


def _record(size: Size, work: str, times: Mapping[str, Sequence[Took]], sidecar_us: float | None = None) -> None:
    case: dict[str, Any] = {"work": work, "entries": ENTRIES, "adapters": RESIDENT, "registered": _many(size)}
    if sidecar_us is not None:
        case["sidecar_cpu_us"] = sidecar_us
    if work in ("core", "ring"):
        case["target"] = True
    Record.of("mapping", case, ("slotcar", times["many"]), ("ten-adapters", times["few"])).printed()


def main() -> None:
    size = size_wanted(__doc__)
    measure_core(size)
    measure_planes(size)


if __name__ == "__main__":
    main()
