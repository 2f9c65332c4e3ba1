"""The holds of one session: which the caller still has, and in which of the server's sessions each was taken.

Invariant: a hold is here from the answer that took it until the answer that released it, or until its time is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from slotcar_client.protocol import SHORTEST_SECONDS, HoldWish
from slotcar_client.values import Held

HeldT = TypeVar("HeldT", bound=Held)
# From hold_id, "name@digest" and tier to the value that the caller gets.
Make = Callable[[int, str, str], HeldT]

# Far from the numbers of requests, which callers use as ids of their own.
_FIRST_OWN_ID = 1 << 63


@dataclass(frozen=True, slots=True)
class Record:
    """One hold; `until` is when its time is over, None if it lasts until it is released."""

    held: Held
    session: str
    slot: bool
    until: float | None
    released: bool = False

    def wish_now(self, now: float) -> HoldWish:
        """The same hold for the rest of its time."""
        seconds = None if self.until is None else max(self.until - now, SHORTEST_SECONDS)
        return HoldWish(self.held.hold_id, self.held.ref, seconds, self.slot)


class Holds:
    """By the caller's hold id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[int, Record] = {}
        self._owed: set[int] = set()
        self._next_id = _FIRST_OWN_ID

    def own_id(self) -> int:
        """An id that no hold of the session had."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, held: Held, wish: HoldWish, session: str) -> None:
        until = None if wish.seconds is None else self._clock() + wish.seconds
        self._records[held.hold_id] = Record(held, session, wish.slot, until)
        self._owed.discard(held.hold_id)

    def release(self, held: Held) -> Record | None:
        """Marks the hold as released, so that it is not taken again; None when it is no longer this caller's."""
        record = self._records.get(held.hold_id)
        if record is None or record.held is not held:
            return None
        self._records[held.hold_id] = replace(record, released=True)
        self._owed.add(held.hold_id)
        return record

    def owed(self, session: str) -> tuple[Record, ...]:
        """The holds of this session that the caller released and the server has not heard of."""
        records = [record for hold_id in self._owed if (record := self._records.get(hold_id)) and record.released]
        for record in records:
            if record.session != session:
                self.forget(record.held)
        return tuple(record for record in records if record.session == session)

    def has(self, hold_id: int) -> bool:
        return hold_id in self._records

    def forget(self, held: Held) -> None:
        record = self._records.get(held.hold_id)
        if record is not None and record.held is held:
            del self._records[held.hold_id]
            self._owed.discard(held.hold_id)

    def lost(self, session: str) -> tuple[Record, ...]:
        """The holds that were taken in another session than this and that the caller still has."""
        if not self._records:
            return ()
        now = self._clock()
        over = [r.held for r in self._records.values() if r.until is not None and r.until <= now]
        for held in over:
            self.forget(held)
        return tuple(r for r in self._records.values() if r.session != session and not r.released)

    def moved(self, record: Record, session: str) -> None:
        """The hold was taken again in this session, unless the caller released it meanwhile."""
        if self._records.get(record.held.hold_id) is record:
            self._records[record.held.hold_id] = replace(record, session=session)
