"""What the cache needs of the parts around it, as protocols, so that they depend on the core and not on each other."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.errors import CapacityExceeded, RequestInvalid
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import Digest, SlotId
from slotcar_sidecar.core.journal import JournalEntry
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.tally import ForwardTally, Work
from slotcar_sidecar.core.tensor import Matrix


class HostAdapter(Protocol):
    """An adapter whose weights are verified and in host memory."""

    @property
    def adapter(self) -> Adapter: ...


class Source(Protocol):
    """Where adapters come from. Both calls block and run in the loader pool."""

    def canonical(self, uri: str) -> str:
        """The one spelling of `uri`. Raises SourceDenied when it is outside every root."""

    def is_remote(self, uri: str) -> bool:
        """Whether `uri` is read over a network, and so may take long. Does not block."""

    def version(self, uri: str) -> Hashable:
        """What identifies the bytes at a canonical `uri` now, without reading them."""

    def read(self, uri: str) -> HostAdapter:
        """Reads and verifies the adapter at a canonical `uri`.

        Raises SourceDenied, SourceUnavailable, AdapterInvalid, AdapterUnsupported or CapacityExceeded.
        """


class HostTier(Protocol):
    """Verified adapters in memory, bounded by bytes. Only the cache's owner calls it."""

    capacity_bytes: int

    @property
    def used_bytes(self) -> int: ...

    @property
    def adapters(self) -> int:
        """How many are here."""

    def get(self, digest: Digest) -> HostAdapter | None:
        """The adapter, which becomes the most recently used, or None."""

    def check(self, weights: HostAdapter, held: Collection[Digest] = ()) -> None:
        """Raises CapacityExceeded if the adapter cannot fit beside what is held."""

    def put(self, weights: HostAdapter, held: Collection[Digest] = ()) -> tuple[Digest, ...]:
        """Stores an adapter and returns what was dropped for it, which is never one of `held`.

        Raises CapacityExceeded, and drops nothing, if it cannot fit beside them.
        """

    def bytes_of(self, digests: Collection[Digest]) -> int:
        """Size of those of `digests` that are here."""

    def drop(self, digest: Digest) -> None:
        """Forgets an adapter, if it is there."""

    def __contains__(self, digest: object) -> bool: ...


class DiskTier(Protocol):
    """Verified adapters as files, bounded by bytes. Only the cache's owner calls it; nothing here raises."""

    capacity_bytes: int
    when_fault: list[Callable[[Digest | None, str], None]]

    @property
    def used_bytes(self) -> int: ...

    @property
    def retained_bytes(self) -> int: ...

    @property
    def adapters(self) -> int:
        """How many are here."""

    def __contains__(self, digest: object) -> bool: ...

    def retains(self, digest: Digest) -> bool:
        """Whether the bytes are here until they are forgotten: memory may drop them though no source has them."""

    def touch(self, digest: Digest) -> None:
        """The adapter was used, wherever its bytes are."""

    def flush(self) -> None:
        """Makes the uses outlive this process."""

    async def read(self, digest: Digest) -> HostAdapter | None:
        """The adapter, verified, or None."""

    def save(self, weights: HostAdapter, *, only: bool) -> Future[None]:
        """Begins to store an adapter; the result is done when that has ended, well or not. `only`: no source has it."""

    def forget(self, digest: Digest) -> None:
        """Nobody here needs the adapter any more."""

    async def adopt(self, wanted: Mapping[Digest, bool]) -> Mapping[Digest, Adapter]:
        """What is here of `wanted`, whose values say whether no source has it; it is needed from now on."""


class Journal(Protocol):
    """What outlives the process of its names. Blocks; runs in the loader pool, one call at a time."""

    def write(self, entries: list[JournalEntry]) -> None:
        """Replaces what is there, whole or not at all. Raises OSError."""


class Upload(Protocol):
    """The files of an adapter that come with a call, in chunks. Each call raises RequestInvalid."""

    def add_config(self, chunk: bytes) -> None:
        """The next bytes of adapter_config.json."""

    def add_weights(self, chunk: bytes) -> None:
        """The next bytes of adapter_model.safetensors."""

    def finish(self, wanted: Digest | None) -> HostAdapter:
        """Verifies files that have come whole. Blocks; runs in the loader pool."""


class Tiers(Protocol):
    """All tiers above the device."""

    host: HostTier
    disk: DiskTier

    def begin_upload(self, config_bytes: int, weights_bytes: int) -> Upload:
        """Makes room for files of these sizes. Raises RequestInvalid or CapacityExceeded."""

    async def from_upload(self, upload: Upload, wanted: Digest | None) -> HostAdapter:
        """Verifies files that have come whole, as those of a source. Raises what `from_source` raises."""

    async def canonical(self, uri: str) -> str:
        """The one spelling of `uri`. Raises SourceDenied."""

    def from_host(self, digest: Digest) -> HostAdapter | None:
        """The adapter, if the host tier has it."""

    def is_remote(self, uri: str) -> bool:
        """Whether a canonical `uri` is read over a network."""

    async def version(self, uri: str) -> Hashable:
        """What identifies the bytes at a canonical `uri` now; see Source.version."""

    async def from_disk(self, digest: Digest, uri: str) -> HostAdapter | None:
        """The adapter, if the disk tier has it, as one that came from `uri`."""

    async def from_source(self, uri: str, wanted: Digest | None) -> HostAdapter:
        """Reads and verifies what is at a canonical `uri` now; "" is that of an upload.

        Raises SourceUnavailable, and DigestMismatch unless it is `wanted`.
        """

    def save(self, weights: HostAdapter, *, only: bool) -> Future[None]:
        """Begins to store an adapter on disk; see DiskTier.save."""

    def forget(self, digest: Digest) -> None:
        """Nothing here needs the adapter any more: its bytes go from every tier."""

    async def adopt(self, sources: Mapping[Digest, str]) -> Mapping[Digest, Adapter]:
        """The adapters that the disk tier has of these, as if they came from their sources; see DiskTier.adopt."""


class Observer(Protocol):
    """Who counts what the cache does. Called on the owner's thread; never raises."""

    def load_stage(self, stage: str, seconds: float, digest: Digest) -> None:
        """A load spent `seconds`, until now, in "read", "wait" (for readers of the slot) or "fill"."""

    def loaded(self, reason: str) -> None:
        """A load ended, for whomever; `reason` is "OK" or a row of the error table."""

    def looked_up(self, tier: str, hits: int, misses: int) -> None:
        """Adapters were looked for in "device", "host" or "disk"."""

    def evicted(self, tier: str, reason: str) -> None:
        """An adapter left "device" for a "load", "mapping" or "prefetch", or "host" for "capacity"."""

    def thrashed(self) -> None:
        """An adapter is in a slot again that was evicted from one a short time ago."""

    def recovered(self) -> None:
        """A session set a stale mapping again, by the digests that it had."""

    def mapping_waited(self, seconds: float) -> None:
        """A SetMapping waits for slots no more."""

    def disk(self, operation: str, result: str) -> None:
        """The disk tier ended a "read" or "write", or something is gone from it ("remove")."""

    def journal(self, result: str) -> None:
        """The journal was "written", or that "failed"."""

    def forward(self, plane: str, seconds: float, reason: str, work: Work, queue_seconds: float) -> None:
        """A Forward ended; `reason` is "OK" or a row of the error table, `work` what it computed."""

    def forward_waited(self) -> None:
        """A Forward waited for a loader, which none should."""

    def begin_tally(self, plane: str) -> ForwardTally:
        """Counts for another thread to write, which are part of the plane's from now on."""

    def end_tally(self, plane: str, tally: ForwardTally) -> None:
        """The thread counts no more."""


class Batch(Protocol):
    """A prepared Forward: index arrays and tensors, ready to launch."""


class Device(Protocol):
    """S slots, each the storage for one adapter over all sites of the model."""

    slots: int
    max_rank: int
    slot_dtype: str

    def shape(self, model: ModelSpec) -> None:
        """Makes the slots for `model`; called once, before any other call."""

    def slot_bytes(self) -> int:
        """Size of one slot over all sites, in bytes; 0 before `shape`."""

    def check(self, weights: HostAdapter) -> None:
        """Raises AdapterInvalid when they do not fit. Blocks; runs in the loader pool."""

    def losses(self, weights: HostAdapter) -> tuple[str, ...]:
        """Checks, and says what the slots' dtype loses of the weights, for people. Blocks as long as a fill does."""

    def fill(self, slot: SlotId, weights: HostAdapter) -> None:
        """Writes an adapter into a slot, zero where it has no weights. Blocks; runs in the loader pool.

        The caller guarantees that nobody reads the slot meanwhile (invariant I2).
        """

    def prepare(
        self, entries: Sequence[tuple[SlotId | None, int]], items: Sequence[ForwardItem], rank: int = 0
    ) -> Batch:
        """Index work of a rank for rows grouped into (slot or None for the base model, number of rows).

        Raises RequestInvalid for an item that needs the base model's output and has none.
        """

    def execute(self, batch: Batch) -> Sequence[Matrix]:
        """Computes one [rows, out] matrix per item, where the item says or in memory of the batch. Blocks.

        Raises RequestInvalid for ids or experts in `aux` that there are not; then nothing was written.
        """

    def publish(self, layout: Layout) -> None:
        """Tells readers in other processes which slots begin to change, before the caller lets anything write there."""

    def close(self) -> None:
        """Tells readers in other processes that nobody looks after the slots any more. Idempotent."""

    def matches(self, slot: SlotId, weights: HostAdapter) -> bool:
        """Whether the slot's bytes are the adapter's, and zero where it has none (invariant I1)."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Threads, clock and randomness, as the process gives them; `remote_pool` reads over a network."""

    load_pool: Executor
    remote_pool: Executor
    compute_pool: Executor
    clock: Callable[[], float]
    new_id: Callable[[], str]
    observer: Observer


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what callers may ask for."""

    device_bytes: int
    max_entries: int
    max_rows: int
    max_response_bytes: int
    max_holds: int
    mapping_idle_seconds: float

    def check_holds(self, count: int, *, is_new: bool) -> None:
        """Raises CapacityExceeded when a session has all the holds that it may have."""
        if is_new and count >= self.max_holds:
            raise CapacityExceeded(
                f"the session has {self.max_holds} holds already: release one", found=count, wanted=self.max_holds
            )

    def check_entries(self, field: str, count: int) -> None:
        """Raises RequestInvalid for more than the entries of the largest mapping; before they are looked at."""
        if count > self.max_entries:
            raise RequestInvalid(field, found=f"{count} of them", wanted=f"at most {self.max_entries}")
