"""What the client hands back: frozen values, without protobuf and without tensors."""

from __future__ import annotations

from collections.abc import Mapping as ReadOnlyDict
from dataclasses import dataclass, field

from slotcar_client.entries import Target


@dataclass(frozen=True, slots=True)
class LayoutVersion:
    """A version of the slot layout; generations compare only inside one epoch."""

    epoch: str
    generation: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot; `state` is "free", "filling", "occupied" or "draining", `digest` is empty when it is free."""

    index: int
    state: str
    digest: str
    mod_generation: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The table slot → state and digest, at one version."""

    version: LayoutVersion
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is and accepts. `planes` are those that it offers this client; over TCP only "stream" serves."""

    version: str
    slots: int
    max_rank: int
    slot_dtype: str
    max_message_bytes: int
    max_response_bytes: int
    planes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A name and what it resolves to.

    `tier` is "source", "disk", "host" or "device", or "gone" for an upload that every tier has lost; `slot` is None
    unless it is "device". `sites` and `history`, the digests that the name had before, the latest first, are empty in
    lists.
    """

    name: str
    digest: str
    source: str
    rank: int
    bytes: int
    tier: str
    slot: int | None
    keep: bool
    pins: int
    sites: tuple[str, ...]
    history: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All adapters, in order of their names, with the layout at the same moment."""

    adapters: tuple[AdapterInfo, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class SiteReport:
    """One site that received weights; `scale` multiplies its delta."""

    name: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class Report:
    """What became of each part of an adapter; `sites` has rank and scale for each of `sites_matched`."""

    rank: int
    bytes: int
    sites: tuple[SiteReport, ...]
    sites_zero: tuple[str, ...]
    fields_ignored: tuple[str, ...]
    warnings: tuple[str, ...]
    file_dtype: str
    slot_dtype: str

    @property
    def sites_matched(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)


@dataclass(frozen=True, slots=True)
class LoadReport(Report):
    """A load that succeeded; `version` is the layout at which the adapter is resident."""

    name: str
    digest: str
    adapter: AdapterInfo
    already_resident: bool
    version: LayoutVersion

    @property
    def generation(self) -> int:
        return self.version.generation


@dataclass(frozen=True, slots=True)
class UnloadReport:
    """An unload; `slot_state` is None when the adapter was in no slot."""

    digest: str
    slot_state: str | None
    pins_ended: int
    version: LayoutVersion


@dataclass(frozen=True, slots=True)
class Estimate(Report):
    """What a load would take; `why_not` is empty when it fits."""

    digest: str
    fits: bool
    why_not: str
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Where an adapter is after a prefetch, None for one that the server does not know.

    `why_not` is empty when it is where it was wanted.
    """

    ref: str
    adapter: AdapterInfo | None
    why_not: str


@dataclass(frozen=True, slots=True)
class RestoreFailure:
    """A name of the server's journal that could not be brought back, and why."""

    ref: str
    why_not: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """How full a server is; a load could take `slots_available` slots now, `waiting` SetMapping calls are queued."""

    version: LayoutVersion
    slots: int
    slots_free: int
    slots_filling: int
    slots_occupied: int
    slots_draining: int
    slots_pinned: int
    slots_available: int
    slots_reserved: int
    keeps: int
    slot_bytes: int
    host_bytes_used: int
    host_bytes_capacity: int
    host_bytes_held: int
    adapters: int
    adapters_capacity: int
    sessions: int
    sessions_capacity: int
    waiting: int
    disk_bytes_used: int = 0
    disk_bytes_capacity: int = 0
    disk_bytes_held: int = 0
    restoring: int = 0
    restore_failures: tuple[RestoreFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The server's process and the settings in force, by flag without dashes; no secret is among them.

    `state` is "waiting_for_model" (ready, but for the model), "serving", "shutting_down" or "device_lost"; `log_level`
    one of LOG_LEVELS; `started_seconds` Unix time by the server's clock; `pid` as the server itself sees it. Relative
    paths belong to `working_directory`; `metrics_url` is "" where there is none.
    """

    server_version: str
    state: str
    log_level: str
    pid: int
    started_seconds: float
    working_directory: str
    addresses: tuple[str, ...]
    metrics_url: str
    settings: dict[str, str]
    version: LayoutVersion


@dataclass(frozen=True, slots=True)
class MappingInfo:
    """A session's mapping; `refs` has "name@digest" once for each adapter. It is `current` if no slot of it changed."""

    mapping_id: int
    generation: int
    refs: tuple[str, ...]
    slots: tuple[int, ...]
    pinned: bool
    current: bool
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class HoldInfo:
    """A session's hold; `tier` is "device" or "host", `left_seconds` None when it lasts until it is released."""

    hold_id: int
    ref: str
    tier: str
    left_seconds: float | None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as others see it: `session` is the first 8 characters of its id.

    `grace_left_seconds` is None while a stream keeps it alive; `joined` are the ranks that have joined, `planes` those
    of "ring" and "direct" for which ranks are connected to shared memory.
    """

    session: str
    client_name: str
    attached: bool
    grace_left_seconds: float | None
    ranks: int
    joined: tuple[int, ...]
    reserved_slots: int
    mappings: tuple[MappingInfo, ...]
    holds: tuple[HoldInfo, ...]
    forwards_in_flight: int
    planes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; `time_seconds` is Unix time by the server's clock, `slot` None if none is concerned.

    `kind` is one of "loaded", "refused", "evicted", "replaced", "unloaded", "draining", "freed", "kept",
    "keep_released", "session_opened", "session_ended", "forward_stale", "held", "hold_released", "expired". `missed`
    events came just before this one and were dropped, because this watcher read too slowly.
    """

    kind: str
    time_seconds: float
    generation: int
    name: str
    digest: str
    slot: int | None
    session: str
    reason: str
    missed: int


@dataclass(frozen=True, slots=True)
class DesiredFile:
    """The file that declares; `version` is a digest of the text in force, "" for none yet.

    `reason` and `message` say why what is in the file now is not in force; "" when it is.
    """

    path: str
    version: str
    prune: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DesiredAdapter:
    """One entry of the file: what is wanted ("present", "keep", "absent"; "" if it is malformed), and how far it is.

    `state` is "pending", "loading", "ready", "absent", "failed" or "invalid", with a `reason` and a `message` unless it
    is as wanted. `place` says where a malformed entry is; `next_try_seconds` is None when only a change can help.
    """

    name: str
    place: str
    desired: str
    source: str
    digest: str
    tier: str
    state: str
    reason: str
    message: str
    attempts: int
    next_try_seconds: float | None
    since_seconds: float


@dataclass(frozen=True, slots=True)
class DesiredSet:
    """What a server's file declares, in order of the names; `file` is None when it follows none."""

    file: DesiredFile | None
    adapters: tuple[DesiredAdapter, ...]


@dataclass(frozen=True, slots=True)
class Mapping:
    """Entries resolved at one layout version.

    `entries` has "name@digest" or BASE for each entry, `digests` the digest of each ref as the caller wrote it,
    `row_counts` the caller's counts or None when it gave none, `slots` the slot of each entry, None for BASE.
    """

    mapping_id: int
    version: LayoutVersion
    entries: tuple[Target, ...]
    digests: ReadOnlyDict[str, str] = field(hash=False)
    row_counts: tuple[int, ...] | None
    slots: tuple[int | None, ...] = ()

    @property
    def generation(self) -> int:
        return self.version.generation

    @property
    def entry_digests(self) -> tuple[str, ...]:
        """The digest of each entry, empty for BASE."""
        return tuple(entry.partition("@")[2] if isinstance(entry, str) else "" for entry in self.entries)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An adapter that a session holds, as it was when it was held.

    `ref` is "name@digest"; `tier` is "device" when its slot is kept too, else "host".
    """

    hold_id: int
    ref: str
    tier: str

    @property
    def digest(self) -> str:
        return self.ref.partition("@")[2]
