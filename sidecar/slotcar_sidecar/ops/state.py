"""The server at one moment, as plain values for people and programs: what the status page and state.json show.

Bounded, however much there is: each part has at most as many rows as `Most` says, and `left_out` counts the rest. A
session is shown by the part of its id that others may see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from slotcar_sidecar.ops.logs import utc_text

_LOOK_SECONDS = 900.0


class Most(IntEnum):
    """The most rows of each part."""

    SLOTS = 256
    PINS = 8
    ADAPTERS = 200
    REFUSED = 50
    SESSIONS = 50
    MAPPINGS = 16
    REFS = 8
    DECLARED = 200
    EVENTS = 200
    LOADS = 50
    LOST = 20


@dataclass(frozen=True, slots=True)
class Server:
    """`readiness` begins with "ready", or says in a few words why nobody should send work."""

    host: str
    version: str
    epoch: str
    generation: int
    readiness: str
    uptime_seconds: float
    device: str
    kernel: str
    slot_bytes: int
    slot_dtype: str
    max_rank: int
    eviction: str
    planes: tuple[str, ...]
    model_sites: int


@dataclass(frozen=True, slots=True)
class Tier:
    """How full a tier is; `held_bytes` of it may not leave."""

    name: str
    used_bytes: int
    capacity_bytes: int
    held_bytes: int
    adapters: int


@dataclass(frozen=True, slots=True)
class Promised:
    """What of the slots is promised to whom, and who waits."""

    slots: Mapping[str, int]
    pinned: int
    reserved: int
    available: int
    keeps: int
    waiting: int
    adapters: int
    most_adapters: int
    sessions: int
    most_sessions: int
    restoring: int
    lost: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pin:
    """Who protects a slot: a mapping or a hold of a session."""

    session: str
    client_name: str
    owner: str
    owner_id: int


@dataclass(frozen=True, slots=True)
class Slot:
    """`pins` are the first of `pin_count`; `used_seconds` is how long ago it was used, None for never."""

    index: int
    state: str
    names: tuple[str, ...]
    digest: str
    mod_generation: int
    used_seconds: float | None
    pin_count: int
    pins: tuple[Pin, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a load was refused, and when, in Unix seconds; `is_over`: the name was loaded after it."""

    time: float
    cause: str
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """When a name lost its slot, and to whom."""

    time: float
    cause: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """A name; `digest` is empty and `tier` "none" for one that was refused and never known.

    `history` has the digests that it had before, the latest first.
    """

    name: str
    tier: str
    digest: str = ""
    slot: int | None = None
    rank: int = 0
    bytes: int = 0
    keep: bool = False
    pins: int = 0
    used_seconds: float | None = None
    history: tuple[str, ...] = ()
    left: Left | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class MappingRow:
    """A mapping; `refs` are the first of `ref_count` adapters of it."""

    mapping_id: int
    generation: int
    refs: tuple[str, ...]
    ref_count: int
    slots: tuple[int, ...]
    is_pinned: bool
    is_current: bool
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold; `left_seconds` is None for one that lasts until it is released."""

    hold_id: int
    ref: str
    keeps_slot: bool
    left_seconds: float | None


@dataclass(frozen=True, slots=True)
class Session:
    """One engine's presence; `grace_seconds` is what is left of its grace while no stream keeps it alive."""

    session: str
    client_name: str
    grace_seconds: float | None
    ranks: int
    joined: int
    planes: tuple[str, ...]
    reserved_slots: int
    forwards_in_flight: int
    mapping_count: int
    mappings: tuple[MappingRow, ...]
    hold_count: int
    holds: tuple[Hold, ...]


@dataclass(frozen=True, slots=True)
class Declared:
    """An entry of the declared set; `reason` and `cause` are empty when nothing stands against it."""

    name: str
    place: str
    wanted: str
    state: str
    reason: str
    cause: str
    attempts: int
    next_try_seconds: float | None
    since_seconds: float


@dataclass(frozen=True, slots=True)
class DeclaredFile:
    """The file that declares, how many of its entries are in each state, and why its text is not in force."""

    path: str
    version: str
    counts: Mapping[str, int]
    cause: str


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; `time` is in Unix seconds."""

    number: int
    time: float
    kind: str
    generation: int
    name: str
    digest: str
    slot: int | None
    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes that were read or written: seconds by stage, in their order."""

    name: str
    digest: str
    started: float
    stages: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.stages)


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence whose subject is `what`."""

    what: str
    text: str


@dataclass(frozen=True, slots=True)
class State:
    """All of it; `time` is in Unix seconds, events and loads are the latest first.

    `certificates` has when each in force ends, in Unix seconds; `not_in_force` why what files say is not.
    """

    time: float
    server: Server
    tiers: tuple[Tier, ...]
    promised: Promised
    slots: tuple[Slot, ...]
    adapters: tuple[Adapter, ...]
    sessions: tuple[Session, ...]
    file: DeclaredFile | None
    declared: tuple[Declared, ...]
    loads: tuple[Load, ...]
    events: tuple[Event, ...]
    left_out: Mapping[str, int]
    certificates: Mapping[str, float] = field(default_factory=dict)
    not_in_force: Mapping[str, str] = field(default_factory=dict)

    @property
    def attention(self) -> tuple[Notice, ...]:
        """What somebody on call should look at first."""
        return tuple(_attention(self))

    @property
    def summary(self) -> str:
        """The server in one line, which changes only with what matters."""
        slots, promised, readiness = self.promised.slots, self.promised, self.server.readiness
        used, found = sum(slots.values()) - slots.get("free", 0), len(self.attention)
        sessions = "1 session" if promised.sessions == 1 else f"{promised.sessions} sessions"
        parts = (f"{used} of {sum(slots.values())} slots in use", sessions, f"{promised.adapters} adapters")
        to_see = "" if not found else " 1 thing needs a look." if found == 1 else f" {found} things need a look."
        return f"{readiness[0].upper()}{readiness[1:]}: {', '.join(parts)}.{to_see}"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        attention = [dataclasses.asdict(notice) for notice in self.attention]
        return {"summary": self.summary, "attention": attention, **dataclasses.asdict(self)}


def _attention(state: State) -> Iterator[Notice]:
    server, promised = state.server, state.promised
    if not server.readiness.startswith("ready"):
        yield Notice("The server", f"is not ready for work: {server.readiness}")
    for name, end in state.certificates.items():
        if end <= state.time:
            yield Notice(f"The certificate {name}", f"is expired since {utc_text(end)}: connections over TCP fail")
    for what, why in state.not_in_force.items():
        yield Notice(f"What the files of the {what} say", f"is not in force: {why}")
    if promised.waiting:
        yield Notice(f"{promised.waiting} mappings", f"wait for slots, of which {promised.available} can be had now")
    if state.file is not None and state.file.cause:
        yield Notice(state.file.path, f"is not in force as it is: {state.file.cause}")
    yield from _failures(state)
    for ref, why in promised.lost.items():
        yield Notice(ref, f"did not come back from the journal: {why}")
    for session in state.sessions:
        stale = sum(not mapping.is_current for mapping in session.mappings)
        if stale:
            who = f"{session.client_name} {session.session}".strip()
            yield Notice(who, f"has {stale} stale mappings, which it must set again by digest")


def _failures(state: State) -> Iterator[Notice]:
    failed = [entry for entry in state.declared if entry.state in ("failed", "invalid")]
    for entry in failed:
        yield Notice(entry.name or entry.place, f"is declared, and {entry.state}: {entry.reason}: {entry.cause}")
    told = {entry.name for entry in failed}
    for adapter in state.adapters:
        failure = adapter.failure
        is_new = failure is not None and not failure.is_over and state.time - failure.time < _LOOK_SECONDS
        if failure is not None and is_new and adapter.name not in told:
            yield Notice(adapter.name, f"was refused: {failure.cause}")
