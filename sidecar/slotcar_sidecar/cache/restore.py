"""After a restart, brings back the names of the journal, and into free slots those that were resident.

Whoever loads or unloads a name meanwhile decides what becomes of it. An entry that cannot be brought back is told of,
stays visible and in the journal, and holds up no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slotcar_sidecar.cache.loads import Loads
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.bindings import Binding
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import Reason, ShuttingDown, SlotcarError
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import AdapterName
from slotcar_sidecar.core.journal import JournalEntry
from slotcar_sidecar.core.layout import SlotState

_MAX_UNNAMED = 2


class Failure(NamedTuple):
    """An entry, and why it could not be brought back as it was."""

    entry: JournalEntry
    why: str


class Restore:
    """What is left to bring back. `failed` has why an entry could not be."""

    def __init__(self, state: State, loads: Loads, entries: Sequence[JournalEntry]) -> None:
        self._state = state
        self._loads = loads
        self._entries = entries
        self._waiting = {entry.ref.name: entry for entry in entries}
        self.failed: dict[AdapterName, Failure] = {}

    @property
    def waiting(self) -> int:
        """How many names are not back yet, and may still come."""
        return len(self._waiting)

    @property
    def missing(self) -> list[JournalEntry]:
        """The entries that are not back as they were."""
        entries = {name: failure.entry for name, failure in self.failed.items()} | self._waiting
        return list(entries.values())

    def settle(self, name: AdapterName) -> None:
        """Somebody loaded or unloaded the name: it is not to come back by itself any more. Idempotent."""
        self._waiting.pop(name, None)
        self.failed.pop(name, None)

    async def name_what_is_on_disk(self) -> None:
        """Gives the names back whose bytes the disk tier has; nothing is read but what entries say of themselves."""
        state = self._state
        found = await state.tiers.adopt({entry.digest: entry.source for entry in self._entries})
        for entry in self._entries:
            adapter, name = found.get(entry.digest), entry.ref.name
            if adapter is None or name not in self._waiting:
                continue
            try:
                state.residency.bind(adapter, Binding(name, source=entry.source or None, in_slot=False))
            except SlotcarError as error:
                state.events.record(EventKind.REFUSED, state.layout.generation, name=name, reason=_said(error))
                self._fail(entry, error)
            else:
                self._is_back(entry)
        state.publish()

    async def run(self) -> None:
        """Brings back all the rest; returns when nothing is left to try."""
        state = self._state
        residents = [entry for entry in self._entries if entry.in_slot or entry.keep]
        if state.model is not None:
            await self._fill(residents)
            await self._name(self._entries)
            return
        await self._name(self._entries)
        while state.model is None and not state.shutting_down:
            await state.changed.wait()
        await self._fill(residents)

    async def _fill(self, residents: list[JournalEntry]) -> None:
        """What was in slots comes into free ones, what is kept first; none waits for another."""
        layout = self._state.layout
        free = len(layout.in_state(SlotState.FREE))
        wanted = sorted(residents, key=lambda entry: not entry.keep)[:free]
        await asyncio.gather(*(self._load(entry, in_slot=True) for entry in wanted))
        slots = self._state.residency.slots
        for entry in reversed(residents):
            # Which came first says nothing of which was used last.
            slot = self._state.residency.readable_slot(entry.digest)
            slots.uses.touch(() if slot is None else (slot,))

    async def _name(self, entries: Iterable[JournalEntry]) -> None:
        """What has no name yet comes into memory, a few at a time, as it must be read from its source."""
        left = iter(entries)

        async def take() -> None:
            for entry in left:
                if entry.ref.name in self._waiting:
                    await self._load(entry, in_slot=False)

        await asyncio.gather(*(take() for _ in range(_MAX_UNNAMED)))

    async def _load(self, entry: JournalEntry, *, in_slot: bool) -> None:
        name, names = entry.ref.name, self._state.residency.names
        is_back = names.get(name) == entry.digest
        if not is_back and name not in self._waiting:
            return
        source = None if is_back else entry.source
        call = LoadCall(entry.ref, source, keep=entry.keep and in_slot, in_slot=in_slot)
        try:
            await self._loads.load(call)
        except ShuttingDown:
            return
        except (SlotcarError, OSError, MemoryError) as error:
            if is_back and names.get(name) is None:
                return  # it was unloaded meanwhile
            comes_later = in_slot and isinstance(error, SlotcarError) and error.reason is Reason.SLOTS_EXHAUSTED
            if entry.keep or not comes_later:
                self._fail(entry, error, comes_later=comes_later)
        else:
            self._is_back(entry)

    def _is_back(self, entry: JournalEntry) -> None:
        if self._waiting.pop(entry.ref.name, None) is not None:
            self._state.residency.names.recall(entry.ref.name, entry.history)

    def _fail(self, entry: JournalEntry, error: Exception, *, comes_later: bool = False) -> None:
        """`comes_later`: the name alone may still come back."""
        self.failed[entry.ref.name] = Failure(entry, _said(error))
        if not comes_later:
            self._waiting.pop(entry.ref.name, None)


def _said(error: Exception) -> str:
    return f"{error.reason}: {error.message}" if isinstance(error, SlotcarError) else str(error)
