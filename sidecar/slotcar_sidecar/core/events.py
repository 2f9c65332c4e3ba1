"""What happened, for people and routers: values, and a bounded record of the last of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict, Unpack

from slotcar_sidecar.core.ids import AdapterName, Digest, SessionId, SlotId

MAX_REPLAY = 1000


class EventKind(StrEnum):
    LOADED = "loaded"
    REFUSED = "refused"
    EVICTED = "evicted"
    REPLACED = "replaced"
    UNLOADED = "unloaded"
    DRAINING = "draining"
    FREED = "freed"
    KEPT = "kept"
    KEEP_RELEASED = "keep_released"
    SESSION_OPENED = "session_opened"
    SESSION_ENDED = "session_ended"
    FORWARD_STALE = "forward_stale"
    HELD = "held"
    HOLD_RELEASED = "hold_released"
    EXPIRED = "expired"
    DECLARED = "declared"
    RECONCILED = "reconciled"
    STORAGE_FAULT = "storage_fault"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; `time` is Unix seconds, `generation` the layout's after it.

    `source` is where what was loaded comes from, "" for an upload.
    """

    number: int
    kind: EventKind
    time: float
    generation: int
    name: AdapterName | None = None
    digest: Digest | None = None
    slot: SlotId | None = None
    session: SessionId | None = None
    reason: str = ""
    source: str = ""


class Subject(TypedDict, total=False):
    """What an event is about, and why it happened."""

    name: AdapterName | None
    digest: Digest | None
    slot: SlotId | None
    session: SessionId | None
    reason: str
    source: str


class EventLog:
    """Numbers events, remembers the last of them and tells whoever listens."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._recent: deque[Event] = deque(maxlen=MAX_REPLAY)
        self._next_number = 1
        self.listeners: list[Callable[[Event], None]] = []

    def record(self, kind: EventKind, generation: int, **subject: Unpack[Subject]) -> None:
        event = Event(self._next_number, kind, self._wall_clock(), generation, **subject)
        self._next_number += 1
        self._recent.append(event)
        for listener in self.listeners:
            listener(event)

    def since(self, number: int) -> list[Event]:
        """The remembered events from `number` on, oldest first."""
        return [event for event in self._recent if event.number >= number]

    @property
    def first_number(self) -> int:
        """The number of the oldest remembered event, or of the next one when there is none."""
        return self._recent[0].number if self._recent else self._next_number

    @property
    def next_number(self) -> int:
        return self._next_number
