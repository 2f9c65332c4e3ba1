"""Stand-ins for the parts around the cache whose every step is taken by the test: no threads, no clock, no files."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, cast

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.adapter import Adapter, SiteLora
from slotcar_sidecar.core.errors import SourceUnavailable
from slotcar_sidecar.core.events import Event, EventLog
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import Digest, Epoch, SlotId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.policy import Eviction
from slotcar_sidecar.core.ports import Environment, Limits
from slotcar_sidecar.core.residency import Residency
from slotcar_sidecar.core.session import Sessions
from slotcar_sidecar.core.tally import ForwardTally, Work
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.store.disk.tier import DiskTierLru, NoDisk, Threads
from slotcar_sidecar.store.host import HostTierLru
from slotcar_sidecar.store.tiers import StoreTiers

from tests.fakes.disk import FakeFolder

T = TypeVar("T")

SITE = "layer.proj"
MODEL = ModelSpec((Site(SITE, 1, 1),))
TORN = "bytes that are being written"
IDLE_SECONDS = 30.0


def digest_of(content: str) -> Digest:
    """The digest of an adapter whose weights are the text `content`."""
    return Digest("sha256:" + hashlib.sha256(content.encode()).hexdigest())


@dataclass(frozen=True)
class Weights:
    """Implements core.ports.HostAdapter: its bytes are its digest."""

    adapter: Adapter


def weights_of(content: str, *, size_bytes: int = 1, source: str = "/adapters/x", rank: int = 1) -> Weights:
    part = SiteLora(SITE, rank, 1.0, 1, 1)
    return Weights(Adapter(digest_of(content), (part,), size_bytes, "F32", source))


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class StepExecutor(Executor):
    """Holds every job until the test runs it, but those that are `at_once`.

    `when_submitted` sees a job as soon as a thread could begin it.
    """

    def __init__(
        self,
        when_submitted: Callable[[Callable[..., Any], tuple[Any, ...]], None] | None = None,
        at_once: Callable[[Callable[..., Any]], bool] = lambda fn: False,
    ) -> None:
        self.jobs: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._when_submitted = when_submitted
        self._at_once = at_once

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._when_submitted:
            self._when_submitted(fn, args)
        self.jobs.append((future, fn, args))
        if self._at_once(fn):
            self.run_one(len(self.jobs) - 1)
        return future

    def run_one(self, index: int = 0) -> None:
        self.jobs.rotate(-index)
        future, fn, args = self.jobs.popleft()
        self.jobs.rotate(index)
        try:
            result = fn(*args)
        except BaseException as error:
            future.set_exception(error)
            del future  # as a real pool does: the error's traceback leads to this frame
        else:
            future.set_result(result)


class InlineExecutor(Executor):
    """Runs every job at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        try:
            return future
        finally:
            del future  # as above


@dataclass
class FakeSource:
    """Folders with their contents; a test changes `contents` as a user would change files."""

    contents: dict[str, str] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    def canonical(self, uri: str) -> str:
        return uri

    def is_remote(self, uri: str) -> bool:
        return uri.startswith("far:")

    def version(self, uri: str) -> Hashable:
        return self.contents.get(uri)

    def read(self, uri: str) -> Weights:
        self.reads.append(uri)
        if uri not in self.contents:
            raise SourceUnavailable(f"nothing at {uri}", source=uri)
        return weights_of(self.contents[uri], source=uri)


class FakeUpload:
    """Implements core.ports.Upload: files that came whole."""

    def __init__(self, content: str) -> None:
        self._content = content

    def add_config(self, chunk: bytes) -> None: ...

    def add_weights(self, chunk: bytes) -> None: ...

    def finish(self, wanted: Digest | None) -> Weights:
        return weights_of(self._content, source="")


@dataclass(frozen=True, eq=False)
class FakeBatch:
    """What a kernel would read: per entry the slot, and the slot's bytes each time that it looked."""

    rows: tuple[tuple[SlotId | None, int], ...]
    seen: list[tuple[str | None, ...]]
    outputs: list[Matrix] = field(default_factory=list)


class FakeDevice:
    """Slots whose bytes are the digest that they hold; a Forward returns, per entry, what it read.

    A kernel reads from `prepare` until `execute` returns, also after its launch has returned, and a fill writes from
    its submission on: bytes that change in between come out as TORN.
    """

    slot_dtype = "float32"
    max_rank = 16

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.bytes: list[str] = [""] * slots
        self.reading: list[FakeBatch] = []
        self.written_while_read: list[SlotId] = []
        self.read_while_written: list[SlotId] = []
        self.writing: set[SlotId] = set()
        self.written_twice: list[SlotId] = []
        self.unannounced: list[SlotId] = []
        self.fail_fill: Exception | None = None
        self.published: Layout | None = None
        self.closed = False
        self.kernel: Callable[[], None] = lambda: None

    def publish(self, layout: Layout) -> None:
        self.published = layout

    def close(self) -> None:
        self.closed = True

    def shape(self, model: ModelSpec) -> None:
        pass

    def slot_bytes(self) -> int:
        return 1

    def begin_write(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if fn == self.fill:
            slot = args[0]
            if slot in self.writing:
                self.written_twice.append(slot)
            if self.published is None or self.published[slot].state is not SlotState.FILLING:
                self.unannounced.append(slot)
            self.writing.add(slot)
            self.bytes[slot] = TORN
            if any(slot == read for batch in self.reading for read, _ in batch.rows):
                self.written_while_read.append(slot)

    def check(self, weights: Weights) -> None: ...

    def losses(self, weights: Weights) -> tuple[str, ...]:
        self.check(weights)
        return ()

    def fill(self, slot: SlotId, weights: Weights) -> None:
        self.writing.discard(slot)
        if self.fail_fill is not None:
            raise self.fail_fill
        self.bytes[slot] = str(weights.adapter.digest)

    def prepare(
        self, entries: Sequence[tuple[SlotId | None, int]], items: Sequence[ForwardItem], rank: int = 0
    ) -> FakeBatch:
        batch = FakeBatch(tuple(entries), [])
        self.launch(batch)
        self.reading.append(batch)
        return batch

    def launch(self, batch: FakeBatch) -> None:
        """A kernel of the batch is launched: it has begun to read, and reads on."""
        batch.seen.append(tuple(self._read(slot) for slot, _ in batch.rows))
        self.read_while_written += [slot for slot, _ in batch.rows if self._read(slot) is TORN and slot is not None]

    def execute(self, batch: FakeBatch) -> list[Matrix]:
        """`kernel` is called in the midst of it."""
        self.kernel()
        self.launch(batch)
        self.reading.remove(batch)
        read = [(looks[0] or "") if len(set(looks)) == 1 else TORN for looks in zip(*batch.seen, strict=True)]
        batch.outputs[:] = [Matrix("float32", len(read), 1, 1, "\n".join(read).encode())]
        return batch.outputs

    def forget(self, batch: FakeBatch) -> None:
        """Nobody will execute the batch any more."""
        if batch in self.reading:
            self.reading.remove(batch)

    def matches(self, slot: SlotId, weights: Weights) -> bool:
        return self.bytes[slot] == str(weights.adapter.digest)

    def _read(self, slot: SlotId | None) -> str | None:
        return None if slot is None else self.bytes[slot]


class SilentObserver:
    """Counts nothing."""

    def load_stage(self, stage: str, seconds: float, digest: Digest) -> None: ...

    def loaded(self, reason: str) -> None: ...

    def looked_up(self, tier: str, hits: int, misses: int) -> None: ...

    def evicted(self, tier: str, reason: str) -> None: ...

    def thrashed(self) -> None: ...

    def recovered(self) -> None: ...

    def mapping_waited(self, seconds: float) -> None: ...

    def disk(self, operation: str, result: str) -> None: ...

    def journal(self, result: str) -> None: ...

    def forward(self, plane: str, seconds: float, reason: str, work: Work, queue_seconds: float) -> None: ...

    def forward_waited(self) -> None: ...

    def begin_tally(self, plane: str) -> ForwardTally:
        return ForwardTally()

    def end_tally(self, plane: str, tally: ForwardTally) -> None: ...


@dataclass
class Bench:
    """A cache over fakes, on an event loop that moves only in `settle`."""

    cache: AdapterCache
    source: FakeSource
    device: FakeDevice
    clock: Clock
    load_pool: StepExecutor
    compute_pool: StepExecutor
    seen: list[Event]
    plane: ClassVar[str] = "unary"


def make_bench(
    slots: int,
    *,
    host_bytes: int = 1 << 20,
    model: ModelSpec | None = MODEL,
    life: int = 1,
    fills_only: bool = False,
    eviction: Eviction = Eviction.LRU,
    folder: FakeFolder | None = None,
    disk_pool: Executor | None = None,
    remote_pool: Executor | None = None,
) -> Bench:
    """A new epoch. Jobs wait in `load_pool` and `compute_pool`; reads of sources run at once.

    `fills_only`: of the loads' jobs only those that write wait.
    """
    clock, device, source = Clock(), FakeDevice(slots), FakeSource()
    load_pool = StepExecutor(device.begin_write, at_once=lambda fn: fills_only and fn != device.fill)
    compute_pool = StepExecutor()
    host = HostTierLru(host_bytes)
    numbers = iter(range(1, 1 << 30))
    seen: list[Event] = []
    events = EventLog(clock)
    events.listeners.append(seen.append)
    observer, inline = SilentObserver(), InlineExecutor()
    far = remote_pool or inline
    environment = Environment(load_pool, far, compute_pool, clock, lambda: f"{life}.{next(numbers)}", observer)
    reading = replace(environment, load_pool=inline)
    threads = Threads(inline, disk_pool or inline, lambda call: call())
    disk = NoDisk() if folder is None else DiskTierLru(folder, threads, observer)
    tiers = StoreTiers(source, host, disk, reading, 1 << 20)
    cache = AdapterCache(
        Residency(Layout.empty(Epoch(f"epoch {life}"), slots), events, tiers.forget, max_names=8, eviction=eviction),
        Sessions(max_sessions=64, max_mappings=8),
        tiers,
        device,
        environment,
        Limits(
            device_bytes=1 << 40,
            max_entries=64,
            max_rows=1 << 20,
            max_response_bytes=1 << 12,
            max_holds=8,
            mapping_idle_seconds=IDLE_SECONDS,
        ),
    )
    if model is not None:
        cache.adopt_model(model)
    return Bench(cache, source, device, clock, load_pool, compute_pool, seen)


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a call that has nothing to wait for; no other step comes between."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    work.close()
    raise AssertionError("the call waits")


async def settle() -> None:
    """Lets everything run that can run without a job being finished."""
    for _ in range(20):
        await asyncio.sleep(0)


def vector(rows: int) -> Matrix:
    """An input for SITE."""
    return Matrix("float32", rows, 1, 1, bytes(4 * rows))
