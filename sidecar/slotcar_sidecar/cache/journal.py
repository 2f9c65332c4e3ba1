"""Writes the journal when names or residents changed, a moment later and in the loader pool: nobody waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from slotcar_sidecar.cache.restore import Restore
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.journal import JournalEntry, NamesCopy
from slotcar_sidecar.core.ports import Journal

_SETTLING_SECONDS = 1.0
# The order of use alone changes all the time.
_ORDER_SECONDS = 30.0


class JournalWriter:
    """Invariant: one write at a time, each of the tables as they are when it begins."""

    def __init__(self, state: State, restore: Restore, journal: Journal) -> None:
        self._state = state
        self._restore = restore
        self._journal = journal
        self._write: asyncio.Task[None] | None = None
        self._begun_at = float("-inf")
        self._changes = -1
        self._residents: tuple[Digest, ...] = ()
        self._has_failed = False

    def look(self) -> None:
        """Begins to write if there is something new, and the last write is a moment ago."""
        elapsed = self._state.now() - self._begun_at
        if self._write is None and elapsed >= _SETTLING_SECONDS and self._is_new(order=elapsed >= _ORDER_SECONDS):
            self._write = asyncio.get_running_loop().create_task(self._write_now())

    async def flush(self) -> None:
        """Returns when what is there now is written, or cannot be."""
        if self._write is not None:
            await self._write
        if self._is_new(order=True):
            await self._write_now()

    def _is_new(self, *, order: bool) -> bool:
        residency = self._state.residency
        if self._has_failed or residency.names.changes != self._changes:
            return True
        residents = residency.residents()
        return residents != self._residents and (order or set(residents) != set(self._residents))

    async def _write_now(self) -> None:
        state, residency = self._state, self._state.residency
        self._begun_at, self._changes = state.now(), residency.names.changes
        self._residents = residency.residents()
        work = self._entries_and_write, residency.names.copy(), self._residents, self._restore.missing
        try:
            await state.run(state.environment.load_pool, *work)
        except OSError as error:
            state.environment.observer.journal("failed")
            if not self._has_failed:
                reason = f"the journal cannot be written: {error.strerror or error}"
                state.events.record(EventKind.STORAGE_FAULT, state.layout.generation, reason=reason)
                state.publish()
            self._has_failed = True
        else:
            state.environment.observer.journal("written")
            self._has_failed = False
        finally:
            self._write = None

    def _entries_and_write(self, names: NamesCopy, residents: tuple[Digest, ...], missing: list[JournalEntry]) -> None:
        """Runs in the loader pool."""
        entries = {entry.ref.name: entry for entry in names.entries(residents)}
        for entry in missing:
            now = entries.get(entry.ref.name)
            if now is None:
                entries[entry.ref.name] = entry
            elif now.ref == entry.ref:
                entries[entry.ref.name] = replace(now, keep=now.keep or entry.keep)
        self._journal.write(list(entries.values()))
