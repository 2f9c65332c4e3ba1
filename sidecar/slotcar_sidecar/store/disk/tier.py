"""The disk tier as the cache's owner sees it: what is there, and jobs for the one thread that changes the folder.

Jobs run in the order in which they were given, so that what was forgotten and comes again is removed first and written
then. A disk that is full, read-only or broken is told of and changes nothing else: loads go on without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.ports import HostAdapter, Observer
from slotcar_sidecar.store.disk.entry import Damaged
from slotcar_sidecar.store.disk.folder import Outcome

# What waits to be written may have left the host tier, and is in memory beside it.
_MAX_WAITING_BYTES = 1 << 30
_STORED = ("written", "present")


class Folder(Protocol):
    """What blocks: see DiskFolder."""

    capacity_bytes: int

    def read(self, digest: Digest) -> HostAdapter | None: ...

    def list(self) -> Outcome: ...

    def write(self, weights: Any, *, only: bool) -> Outcome: ...

    def remove(self, digest: Digest) -> Outcome: ...

    def discard(self, digest: Digest) -> Outcome: ...

    def touch(self, digests: frozenset[Digest]) -> Outcome: ...

    def adopt(self, wanted: Mapping[Digest, bool]) -> tuple[Mapping[Digest, Adapter], Outcome]: ...


class Threads(NamedTuple):
    """`read`: for reading; `change`: one thread, for all else; `tell` runs a call soon, in the owner's thread."""

    read: Executor
    change: Executor
    tell: Callable[[Callable[[], None]], object]


@dataclass(eq=False, slots=True)
class _Write:
    """An adapter on its way to the disk, and who waits for that."""

    digest: Digest
    only: bool
    bytes: int
    future: Future[Outcome] | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    ended: bool = False


class DiskTierLru:
    """Implements core.ports.DiskTier. Only the cache's owner calls it.

    Invariant: what it retains is in the folder, marked as needed and nowhere else, until it is forgotten or found
    damaged.
    """

    def __init__(self, folder: Folder, threads: Threads, observer: Observer) -> None:
        self.capacity_bytes = folder.capacity_bytes
        self.when_fault: list[Callable[[Digest | None, str], None]] = []
        self._folder = folder
        self._threads = threads
        self._observer = observer
        self._sizes: dict[Digest, int] = {}
        self._used_bytes = 0
        # What this sidecar marked as needed here, there or not, and whether nothing else has it.
        self._needed: dict[Digest, bool] = {}
        self._writes: dict[Digest, _Write] = {}
        self._touched: set[Digest] = set()
        self._waiting_bytes = 0
        self._note(None, folder.list())

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def retained_bytes(self) -> int:
        return sum(self._sizes.get(digest, 0) for digest, only in self._needed.items() if only)

    @property
    def adapters(self) -> int:
        return len(self._sizes)

    def __contains__(self, digest: object) -> bool:
        return digest in self._sizes

    def retains(self, digest: Digest) -> bool:
        """Whether the bytes are here, safe from being evicted, until they are forgotten."""
        return digest in self._sizes and self._needed.get(digest, False)

    def touch(self, digest: Digest) -> None:
        """The adapter was used, wherever its bytes are."""
        if digest in self._sizes:
            self._touched.add(digest)

    def flush(self) -> None:
        """Tells the folder what was used since the last time."""
        if self._touched:
            digests, self._touched = frozenset(self._touched), set()
            self._begin(partial(self._folder.touch, digests), None)

    async def read(self, digest: Digest) -> HostAdapter | None:
        """The adapter, verified; None if it is not here, or was damaged and is gone now."""
        try:
            loop = asyncio.get_running_loop()
            weights = await loop.run_in_executor(self._threads.read, self._folder.read, digest)
        except Damaged as error:
            self._observer.disk("read", "damaged")
            self._tell_fault(digest, f"the entry is damaged: {error}")
            self._miss(digest)
            self._begin(partial(self._folder.discard, digest), digest)
            return None
        except (OSError, MemoryError) as error:
            self._observer.disk("read", "failed")
            self._tell_fault(digest, f"cannot read: {error}")
            return None
        if weights is None and digest in self._sizes:
            # Another sidecar evicted it.
            self._miss(digest)
            self._begin(self._folder.list, None)
        self._observer.disk("read", "miss" if weights is None else "hit")
        return weights

    def save(self, weights: HostAdapter, *, only: bool) -> asyncio.Future[None]:
        """Begins to store an adapter, unless it is here, and returns what is done when that has ended, well or not.

        Nothing is written while too much else waits for it. `only`: nothing else has the bytes.
        """
        digest = weights.adapter.digest
        self.touch(digest)
        if not self._is_wanted(digest, only):
            return self._end_of(self._writes.get(digest))
        size = weights.adapter.bytes
        if self._waiting_bytes and self._waiting_bytes + size > _MAX_WAITING_BYTES:
            self._observer.disk("write", "skipped")
            return self._end_of(None)
        self._waiting_bytes += size
        self.flush()
        write = self._writes[digest] = _Write(digest, only, size)
        job = partial(self._folder.write, weights, only=only)
        write.future = self._threads.change.submit(job)
        write.future.add_done_callback(lambda done: self._threads.tell(partial(self._written, write, done)))
        return self._end_of(write)

    def _is_wanted(self, digest: Digest, only: bool) -> bool:
        """Whether a write would change anything."""
        if digest in self._writes:
            return False
        needed = self._needed.get(digest) if digest in self._sizes else None
        return needed is None or (only and not needed)

    def _end_of(self, write: _Write | None) -> asyncio.Future[None]:
        end = asyncio.get_running_loop().create_future()
        if write is None or write.ended:
            end.set_result(None)
        else:
            write.waiting.append(end)
        return end

    def _written(self, write: _Write, done: Future[Outcome]) -> None:
        self._waiting_bytes -= write.bytes
        write.ended = True
        is_forgotten = self._writes.get(write.digest) is not write
        if not is_forgotten:
            del self._writes[write.digest]
        if not done.cancelled():
            outcome = done.result()
            self._observer.disk("write", outcome.result)
            self._note(write.digest, outcome)
            if outcome.result in _STORED and not is_forgotten:
                self._needed[write.digest] = write.only or self._needed.get(write.digest, False)
        for end in write.waiting:
            if not end.done():
                end.set_result(None)

    def forget(self, digest: Digest) -> None:
        """This sidecar does not need the adapter any more; its bytes go unless another one does. Never waits."""
        needed = self._needed.pop(digest, None)
        self._touched.discard(digest)
        write = self._writes.pop(digest, None)
        if write is not None and write.future is not None:
            write.future.cancel()
        if needed is not None or write is not None or digest in self._sizes:
            self._begin(partial(self._folder.remove, digest), digest)

    async def adopt(self, wanted: Mapping[Digest, bool]) -> Mapping[Digest, Adapter]:
        """Of the wanted digests those that are here, with what their entries say; they are needed from now on.

        The value of `wanted` says whether nothing else has the bytes. The bytes themselves are not verified yet.
        """
        job = asyncio.wrap_future(self._threads.change.submit(self._folder.adopt, wanted))
        found, outcome = await job
        self._note(None, outcome)
        self._needed |= {digest: wanted[digest] for digest in found}
        return found

    # Jobs and their ends

    def _begin(self, job: Callable[[], Outcome], digest: Digest | None) -> None:
        future = self._threads.change.submit(job)
        future.add_done_callback(lambda done: self._threads.tell(partial(self._ended, digest, done)))

    def _ended(self, digest: Digest | None, done: Future[Outcome]) -> None:
        if not done.cancelled():
            self._note(digest, done.result())

    def _note(self, digest: Digest | None, outcome: Outcome) -> None:
        for gone, why in outcome.changes.went.items():
            self._observer.disk("remove", why)
            self._miss(gone)
        for come, size in outcome.changes.came.items():
            self._used_bytes += size - self._sizes.get(come, 0)
            self._sizes[come] = size
        if outcome.fault:
            self._tell_fault(digest, outcome.fault)

    def _miss(self, digest: Digest) -> None:
        """The entry is not there any more; its mark may be, until it is forgotten."""
        self._used_bytes -= self._sizes.pop(digest, 0)

    def _tell_fault(self, digest: Digest | None, what: str) -> None:
        for listener in self.when_fault:
            listener(digest, what)


class NoDisk:
    """Implements core.ports.DiskTier without a disk: nothing is ever here."""

    capacity_bytes = 0
    used_bytes = 0
    retained_bytes = 0
    adapters = 0

    def __init__(self) -> None:
        self.when_fault: list[Callable[[Digest | None, str], None]] = []

    def __contains__(self, digest: object) -> bool:
        return False

    def retains(self, digest: Digest) -> bool:  # noqa: ARG002
        return False

    def touch(self, digest: Digest) -> None: ...

    def flush(self) -> None: ...

    async def read(self, digest: Digest) -> HostAdapter | None:  # noqa: ARG002
        return None

    def save(self, weights: HostAdapter, *, only: bool) -> asyncio.Future[None]:  # noqa: ARG002
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        end.set_result(None)
        return end

    def forget(self, digest: Digest) -> None: ...

    async def adopt(self, wanted: Mapping[Digest, bool]) -> Mapping[Digest, Adapter]:  # noqa: ARG002
        return {}
