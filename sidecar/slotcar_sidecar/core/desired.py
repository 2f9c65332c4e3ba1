"""One declared adapter: what is wanted of it, how far that is, and what is to be done next.

An entry changes only by what it is told: what there is now, and how a load or a look ended. Nothing is done here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from slotcar_sidecar.core.errors import ModelUnknown, Reason, SlotcarError
from slotcar_sidecar.core.ids import AdapterName, Digest

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
_MOST_DOUBLINGS = 10

# What waiting does not mend: the entry must change, or what is at its source.
WAITS_FOR_CHANGE = frozenset(
    {
        Reason.ADAPTER_INVALID,
        Reason.ADAPTER_UNSUPPORTED,
        Reason.DIGEST_MISMATCH,
        Reason.MODEL_MISMATCH,
        Reason.REQUEST_INVALID,
        Reason.SOURCE_DENIED,
    }
)


class Wanted(StrEnum):
    """`present`: the name is known, and not kept; `keep`: it is kept in a slot; `absent`: there is no such name."""

    PRESENT = "present"
    KEEP = "keep"
    ABSENT = "absent"


class EntryState(StrEnum):
    """Where an entry is. `ready` and `absent` are what was wanted; `invalid` entries are malformed and do nothing."""

    PENDING = "pending"
    LOADING = "loading"
    READY = "ready"
    ABSENT = "absent"
    FAILED = "failed"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Want:
    """A sound entry of a declared set; `in_slot` and `on_disk` say how near it is loaded, as in LoadCall."""

    name: AdapterName
    state: Wanted = Wanted.PRESENT
    source: str = ""
    digest: Digest | None = None
    in_slot: bool = False
    on_disk: bool = False


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an entry is not what is wanted, in the words of the error table."""

    reason: Reason
    message: str

    @classmethod
    def of(cls, error: SlotcarError) -> Cause:
        return cls(error.reason, error.message)


@dataclass(frozen=True, slots=True)
class Malformed:
    """An entry that says nothing sound: its place, such as adapters[3], and its name as far as that can be read."""

    place: str
    name: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class DesiredSet:
    """What a file declares. `prune`: what an earlier version declared, and this one does not name, is unloaded."""

    wants: tuple[Want, ...] = ()
    malformed: tuple[Malformed, ...] = ()
    prune: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is under a name."""

    digest: Digest
    kept: bool


class World(Protocol):
    """What there is now."""

    @property
    def now(self) -> float:
        """Seconds of a clock that only goes forward."""

    @property
    def model_known(self) -> bool: ...

    def seen(self, name: AdapterName) -> Seen | None:
        """What the name has, None for an unknown one."""

    def room(self, wanted: Wanted) -> int:
        """How many adapters more could get a slot, and a keep if that is wanted."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load what is wanted."""

    want: Want


@dataclass(frozen=True, slots=True)
class Look:
    """See which bytes are at the source now."""

    want: Want


@dataclass(frozen=True, slots=True)
class Release:
    """End the name's keep, at once."""

    name: AdapterName


@dataclass(frozen=True, slots=True)
class Unload:
    """Take the name away, at once."""

    name: AdapterName


Action = Load | Look | Release | Unload


@dataclass(frozen=True, slots=True)
class Loaded:
    """The name has the digest; `placed`: it was in a slot."""

    digest: Digest
    placed: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A load failed. `version` says which bytes its source had, `room` how much there was."""

    cause: Cause
    version: Hashable = None
    room: int = 0


@dataclass(frozen=True, slots=True)
class Looked:
    """Which bytes the source has."""

    version: Hashable


Outcome = Loaded | Refused | Looked


@dataclass(frozen=True, slots=True)
class Entry:
    """How far a want is. `attempts` counts its loads; `due` is when a failed one is tried, or its source looked at.

    `digest` is what the last load gave the name, `placed` that it has been in a slot: who is evicted later is up to the
    policy. `waits` counts what came to nothing since something changed, and gives the back-off.
    """

    want: Want
    since: float
    state: EntryState = EntryState.PENDING
    cause: Cause | None = None
    attempts: int = 0
    due: float | None = None
    digest: Digest | None = None
    placed: bool = False
    waits: int = 0
    refused: Refused | None = None

    @property
    def waits_for_change(self) -> bool:
        """Only a change of the entry, or of what is at its source, can mend it."""
        return self.refused is not None and self.refused.cause.reason in WAITS_FOR_CHANGE

    @property
    def next_try(self) -> float | None:
        """When it is loaded again by itself."""
        return None if self.waits_for_change else self.due

    @property
    def is_tried(self) -> bool:
        """What is wanted was reached, or what stands against it is known."""
        return self.state is not EntryState.PENDING or self.cause is not None

    def judge(self, world: World) -> tuple[Entry, Action | None]:
        """The entry in the light of what there is, and what to do about it."""
        seen, want = world.seen(self.want.name), self.want
        if want.state is Wanted.ABSENT:
            return (self._reached(EntryState.ABSENT, world.now), None) if seen is None else (self, Unload(want.name))
        if seen is not None and seen.kept and want.state is Wanted.PRESENT:
            return self, Release(want.name)
        if seen is not None and seen.digest == (want.digest or self.digest):
            if (self.placed or not want.in_slot) and (seen.kept or want.state is Wanted.PRESENT):
                return self._reached(EntryState.READY, world.now), None
            if not world.model_known and self.digest is not None:
                return self._moved(EntryState.PENDING, Cause.of(ModelUnknown()), world.now), None
        if self.refused is None:
            entry = self._moved(EntryState.PENDING, None, world.now)
            return replace(entry, attempts=0 if self.state is EntryState.READY else self.attempts), Load(want)
        if not self._may_try(self.refused, world):
            return self, None
        return self, Look(want) if self.waits_for_change else Load(want)

    def end(self, outcome: Outcome, now: float) -> Entry:
        """The entry after a load or a look."""
        if isinstance(outcome, Loaded):
            tried = replace(self, attempts=self.attempts + 1, refused=None, due=None, waits=0)
            return replace(tried, digest=outcome.digest, placed=outcome.placed)
        if isinstance(outcome, Refused):
            moved = self._moved(EntryState.FAILED, outcome.cause, now)
            return replace(moved, attempts=self.attempts + 1, refused=outcome)._back_off(now)
        if self.refused is not None and self.refused.version == outcome.version:
            return self._back_off(now)
        return replace(self, refused=None, due=None, waits=0)

    def _may_try(self, refused: Refused, world: World) -> bool:
        if self.due is None or world.now >= self.due:
            return True
        failed_at = self.due - delay_seconds(self.waits)
        has_rested = world.now - failed_at >= FIRST_RETRY_SECONDS
        waits_for_room = refused.cause.reason is Reason.SLOTS_EXHAUSTED
        return waits_for_room and has_rested and world.room(self.want.state) > refused.room

    def _back_off(self, now: float) -> Entry:
        waits = self.waits + 1
        return replace(self, waits=waits, due=now + delay_seconds(waits))

    def _reached(self, state: EntryState, now: float) -> Entry:
        return replace(self._moved(state, None, now), refused=None, due=None, waits=0)

    def _moved(self, state: EntryState, cause: Cause | None, now: float) -> Entry:
        """In another state since now, or in the same since then."""
        return replace(self, state=state, cause=cause, since=now if state is not self.state else self.since)


def delay_seconds(waits: int) -> float:
    """How long to wait after so many times in vain: 1, 2, 4, … seconds, a minute at most."""
    return min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(waits - 1, _MOST_DOUBLINGS))
