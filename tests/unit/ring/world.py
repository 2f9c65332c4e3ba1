"""A sidecar's rings over a real device, on an event loop and threads that move only when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slotcar.shm.region import ABSENT, Item, Kind
from slotcar.v1 import engine_service_pb2 as pb
from slotcar_kernels.reference import lora_delta
from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.events import EventLog
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import AdapterRef, Epoch, SessionId, SlotId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.ports import Batch, Environment, Limits
from slotcar_sidecar.core.residency import Residency
from slotcar_sidecar.core.session import Session, Sessions, SessionTerms
from slotcar_sidecar.core.tally import ForwardTally
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.device.cpu import CpuBatch, CpuDevice
from slotcar_sidecar.process.sockets import listen_for_handshakes
from slotcar_sidecar.ring.handshake import Handshakes
from slotcar_sidecar.ring.rings import RingLimits, Rings, SlotsDescriptor, Surroundings
from slotcar_sidecar.ring.thread import RingThread
from slotcar_sidecar.rpc.access import Access
from slotcar_sidecar.store.disk.tier import NoDisk
from slotcar_sidecar.store.host import HostTierLru
from slotcar_sidecar.store.tiers import StoreTiers

from tests.fakes.parts import Clock, InlineExecutor, SilentObserver
from tests.fakes.weights import FakeWeights, fake_weights
from tests.unit.ring.raw import Answer, RawClient, forward_request, hello, mapping_request

MODEL = ModelSpec.of([Site("down", 48, 32), Site("k", 32, 16), Site("q", 32, 32)])
DOWN, K, Q = range(3)
RANK = 16
EPOCH = "e" * 16
OUT = 8192
IDLE_SECONDS = 30.0


class MemorySource:
    """Adapters by the name of their folder."""

    def __init__(self) -> None:
        self.weights: dict[str, FakeWeights] = {}

    def canonical(self, uri: str) -> str:
        return uri

    def is_remote(self, uri: str) -> bool:
        return False

    def version(self, uri: str) -> str:
        return uri

    def read(self, uri: str) -> FakeWeights:
        return self.weights[uri]


class Observer(SilentObserver):
    """Keeps the tallies, by plane."""

    def __init__(self) -> None:
        self.tallies: dict[str, ForwardTally] = {}

    def begin_tally(self, plane: str) -> ForwardTally:
        return self.tallies.setdefault(plane, ForwardTally())


@dataclass(eq=False)
class World:
    """`calls` has how calls ended, `called_back` the threads that were."""

    path: Path
    slots: int = 3
    threads: int = 1
    planes: tuple[str, ...] = ("ring", "direct")
    max_rings: int = 8
    calls: list[tuple[str, str]] = field(default_factory=list)
    called_back: list[RingThread] = field(default_factory=list)
    guard: Callable[[AdapterCache], Access] | None = None

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.clock, self.source, self.observer = Clock(), MemorySource(), Observer()
        self.device = StepDevice(self.slots)
        self.cache = self._make_cache()
        self.access = self.guard(self.cache) if self.guard is not None else None
        tell = loop.call_soon_threadsafe
        around = Surroundings(tell, self.called_back.append, self._slots_descriptor, self._count, self.access)
        limits = RingLimits(self.planes, 1 << 20, self.max_rings)
        self.rings = Rings(self.cache, limits, self.threads, around)
        self.handshakes = Handshakes(self.rings, "0.1.0", self._count, self.access)
        self.handshakes.listen(listen_for_handshakes(self.path), self.path)
        self._resources = ExitStack()

    def _make_cache(self) -> AdapterCache:
        events, host, numbers = EventLog(self.clock), HostTierLru(1 << 24), iter(range(1, 1 << 30))
        pool = InlineExecutor()
        environment = Environment(pool, pool, pool, self.clock, lambda: f"{next(numbers):08}", self.observer)
        tiers = StoreTiers(self.source, host, NoDisk(), environment, 1 << 20)
        return AdapterCache(
            Residency(Layout.empty(Epoch(EPOCH), self.slots), events, tiers.forget, max_names=64),
            Sessions(max_sessions=64, max_mappings=8),
            tiers,
            self.device,
            environment,
            Limits(1 << 30, 4096, 1 << 12, 1 << 20, 8, IDLE_SECONDS),
        )

    def _slots_descriptor(self) -> SlotsDescriptor | None:
        file = self.device.file
        return None if file is None else SlotsDescriptor(file.descriptor, file.geometry.total_bytes)

    def _count(self, method: str, reason: str) -> None:
        self.calls.append((method, reason))

    # Steps

    async def settle(self) -> None:
        """Everything goes on until all that is left waits for another step of the test."""
        for _ in range(30):
            await asyncio.sleep(0)
            for ring in self.rings.threads:
                ring.turn(0)
        await asyncio.sleep(0)

    async def settle_owner(self) -> None:
        """Everything goes on but the threads of rings."""
        for _ in range(30):
            await asyncio.sleep(0)

    def session(self, **terms: Any) -> Session:
        return self.cache.open_session(SessionTerms("engine", 10.0, **terms), None)

    async def load(self, *names: str) -> None:
        """Adapters with all sites; each name has weights of its own."""
        for name in names:
            if name not in self.source.weights:
                ranks = dict.fromkeys(("down", "k", "q"), 4 + len(self.source.weights))
                self.source.weights[name] = fake_weights(MODEL, ranks, seed=len(self.source.weights))
            await self.cache.load(LoadCall(AdapterRef.parse(name), name))

    async def connect(self, session: Session | SessionId | str, plane: str = "ring", **fields: Any) -> RawClient:
        """A client that has been welcomed. Raises Refused."""
        session_id = session.session_id if isinstance(session, Session) else session
        return await self.say(hello(session_id, plane, **fields))

    async def say(self, message: bytes) -> RawClient:
        client = RawClient(self.path, message)
        self._resources.callback(client.close)
        await self.settle()
        return client.welcome(timeout_seconds=1.0)

    async def call(self, client: RawClient, kind: Kind, payload: bytes) -> Answer:
        """A call and its answer. Raises Refused."""
        cell = client.send(kind, payload)
        await self.settle()
        return client.answer(cell)

    async def map(self, client: RawClient, *refs: str, **fields: Any) -> int:
        """Sets a mapping through the ring; returns its generation."""
        answer = await self.call(client, Kind.SET_MAPPING, mapping_request(*refs, **fields))
        return int(pb.SetMappingResponse.FromString(answer.payload).generation)

    def wanted(self, names: list[str], site: int, x: np.ndarray) -> np.ndarray:
        """The delta of each row, of the adapter of that name; zeros for the base model."""
        rows = []
        for name, row in zip(names, x, strict=True):
            spec = MODEL.sites[site]
            if not name:
                rows.append(np.zeros(spec.out_features, dtype=np.float32))
                continue
            weights = self.source.weights[name]
            scale = next(part.scale for part in weights.adapter.parts if part.site == spec.name)
            delta = lora_delta(torch.from_numpy(row[None].copy()), weights.a[spec.name], weights.b[spec.name], scale)
            rows.append(delta[0].float().numpy())
        return np.stack(rows)

    # The end

    async def close(self) -> None:
        self._resources.close()
        self.handshakes.close()
        self.rings.close()
        await self.settle()
        assert len(self.rings) == 0
        self.rings.finish()
        self.path.unlink()


class StepDevice(CpuDevice):
    """A device whose kernels begin with a step of the test's; `prepared` counts the batches."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, RANK, poison=True, epoch=EPOCH)
        self.before_kernel: Callable[[], object] = lambda: None
        self.prepared = 0

    def prepare(
        self, entries: Sequence[tuple[SlotId | None, int]], items: Sequence[ForwardItem], rank: int = 0
    ) -> CpuBatch:
        self.prepared += 1
        return super().prepare(entries, items, rank)

    def execute(self, batch: Batch) -> tuple[Matrix, ...]:
        self.before_kernel()
        return super().execute(batch)


def open_descriptors() -> int:
    """How many this process has, apart from the slots', which a device has for as long as it lives."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "slotcar-slots" not in str(link.readlink())
    return count


def rows_of(seed: int, count: int, features: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, features)).astype(np.float32)


def one_row_each(generation: int, count: int, site: int = Q, **fields: Any) -> bytes:
    """A Forward of one row for each of `count` entries: x at 0, the result at OUT."""
    return forward_request(generation, [1] * count, [Item(site, 0, ABSENT, OUT)], **fields)
