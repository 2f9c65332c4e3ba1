"""Which versions of a step get slots: rank 0 sets the mapping, and says for whom there is no version or no slot.

Invariant: a mapping is set by digests only, so that a step that is repeated uses the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from slotcar_client.client import Client
from slotcar_client.engines.vllm.adapters import Keeper
from slotcar_client.engines.vllm.opening import waited
from slotcar_client.engines.vllm.rows import Rows
from slotcar_client.engines.vllm.settings import Settings
from slotcar_client.entries import BASE, Entry
from slotcar_client.errors import SlotcarError, SlotsExhausted
from slotcar_client.recovery import is_away
from slotcar_client.session import Session
from slotcar_client.values import Mapping

_REFRESH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Placed:
    """What rank 0 decided: the mapping's session and entries, which versions are lost, and which have no slot now."""

    session_id: str
    entries: Sequence[Entry] = ()
    lost: dict[str, SlotcarError] = field(default_factory=dict)
    postponed: frozenset[str] = frozenset()


class Placement:
    """The slots of one engine, at its rank 0."""

    def __init__(self, client: Client, session: Session, settings: Settings, max_loras: int) -> None:
        self.mapping: Mapping | None = None
        self._entries: Sequence[Entry] = ()
        self.keeper = Keeper(client, session)
        self._client = client
        self._session = session
        self._settings = settings
        self._max_loras = max_loras
        self._slots = max_loras
        self._asked_at = 0.0
        self._refresh(0)

    def slots(self) -> int:
        """How many distinct adapters a step of this engine may have, as far as the sidecar's other users allow."""
        if self._slots < self._max_loras and time.monotonic() - self._asked_at > _REFRESH_SECONDS:
            mapped = {slot for slot in self.mapping.slots if slot is not None} if self.mapping is not None else ()
            self._refresh(len(mapped))
        return self._slots

    def place(self, rows: Rows, *, repair: bool) -> Placed:
        """Sets the mapping of a step's rows. repair: the last one failed, or what it needs may be gone.

        Raises SlotcarError when nobody can be served, Unavailable after the time that a step waits.
        """
        if not repair:
            try:
                self._set(rows, rows.versions)
                return self._placed()
            except SlotcarError:  # looked into below, version by version
                pass
        return waited(lambda: self._repaired(rows), self._settings.step_wait_seconds)

    def _repaired(self, rows: Rows) -> Placed:
        versions = rows.versions
        lost = {ref: error for ref, error in self.keeper.renew(versions).items() if ref in versions}
        wanted = [ref for ref in versions if ref not in lost]
        served = self._fitting(rows, wanted) if wanted else 0
        postponed = frozenset(wanted[served:])
        if postponed:
            self._slots = max(served, 1)
        return self._placed(lost, postponed)

    def _placed(self, lost: dict[str, SlotcarError] | None = None, postponed: Collection[str] = ()) -> Placed:
        return Placed(self._session.session_id, self._entries, lost or {}, frozenset(postponed))

    def _fitting(self, rows: Rows, wanted: Sequence[str]) -> int:
        """How many of the versions, the first ones, have got slots. Where nobody could go on it waits for one."""
        for count in range(len(wanted), 0, -1):
            try:
                self._set(rows, wanted[:count])
                return count
            except SlotsExhausted:
                continue
        if all(rows.refs):
            self._set(rows, wanted[:1], self._settings.wait_seconds)
            return 1
        return 0

    def _set(self, rows: Rows, served: Collection[str], wait_seconds: float = 0.0) -> None:
        refs = [ref for ref, _ in groupby(ref if ref in served else None for ref in rows.refs)]
        self._entries = [BASE if ref is None else self.keeper.entry(ref) for ref in refs]
        self.mapping = self._session.set_mapping(self._entries, load=True, wait_seconds=wait_seconds)

    def _refresh(self, mapped: int) -> None:
        self._asked_at = time.monotonic()
        try:
            available = self._client.capacity().slots_available
        except SlotcarError as error:
            if not is_away(error):
                raise
            return
        self._slots = max(1, min(self._max_loras, mapped + available))
