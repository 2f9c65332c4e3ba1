"""Follows the declaring file, and brings about what it declares, entry by entry.

Invariant: the set in force is that of the last version of the file that could be read as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Protocol

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.desired import Cause, Entry, EntryState, Load, Look, Release, Unload
from slotcar_sidecar.core.errors import InternalError, Reason, ShuttingDown, SlotcarError, listed
from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.core.ids import AdapterName, AdapterRef
from slotcar_sidecar.core.reconcile import DesiredStatus, FileStatus, Reconciliation
from slotcar_sidecar.sync.file import Declaration, identity, read
from slotcar_sidecar.sync.lanes import Lane
from slotcar_sidecar.sync.looks import looks
from slotcar_sidecar.sync.steps import CacheWorld, Steps

_log = logging.getLogger("slotcar")

_MAX_LIST_BYTES = 200
_OWN = (EventKind.DECLARED, EventKind.RECONCILED)
# After these there may be a model, or room in slots that there was not.
_MAY_HELP = frozenset(
    {
        EventKind.SESSION_OPENED,
        EventKind.SESSION_ENDED,
        EventKind.HOLD_RELEASED,
        EventKind.KEEP_RELEASED,
        EventKind.EXPIRED,
        EventKind.FREED,
        EventKind.UNLOADED,
    }
)


class SyncObserver(Protocol):
    """Who counts what a reconciler does. Called on the owner's thread; never raises."""

    def desired_entries(self, counts: Mapping[EntryState, int]) -> None:
        """How many entries are in each state now."""

    def desired_failed(self, reason: str) -> None:
        """An entry failed, or the file cannot be read, for a row of the error table."""

    def desired_settled(self, seconds: float) -> None:
        """Each entry of a version was tried, so long after the version was read."""

    def desired_file(self, *, in_force: bool) -> None:
        """What is in the file now is in force, or is not."""


class Reconciler:
    """Runs on the event loop's thread, as the cache does; reads files in its pools."""

    def __init__(self, cache: AdapterCache, path: Path, poll_seconds: float, observer: SyncObserver) -> None:
        self._cache = cache
        self._path = path
        self._poll_seconds = poll_seconds
        self._observer = observer
        self._world = CacheWorld(cache)
        self._steps = Steps(cache, self._world)
        self._table = Reconciliation(self._entry_changed)
        self._lanes = {False: Lane(), True: Lane()}
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked_at: Hashable = object()
        self._version = ""
        self._prune = False
        self._cause: Cause | None = None
        self._is_settled = True
        self._dirty: set[AdapterName] = set()
        self._may_help = False
        self._wake = asyncio.Event()
        self._asked = asyncio.Event()

    def look(self) -> None:
        """Reads the file now, changed or not, and looks at each entry."""
        self._looked_at = object()
        self._asked.set()
        self._dirty |= self._table.names
        self._wake.set()

    def status(self) -> DesiredStatus:
        """The file, and how far each of its entries is."""
        return DesiredStatus(self._file_status(), self._table.status(self._world.now), self._table.counts())

    def worst(self, most: int) -> DesiredStatus:
        """The same with so many entries at most, those first that need a look."""
        return DesiredStatus(self._file_status(), self._table.worst(self._world.now, most), self._table.counts())

    def _file_status(self) -> FileStatus:
        return FileStatus(str(self._path), self._version, self._prune, self._cause)

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        self._cache.events.listeners.append(self._happened)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                group.create_task(self._reconcile())
        finally:
            self._cache.events.listeners.remove(self._happened)
            for task in self._tasks:
                task.cancel()

    # The file

    async def _follow(self) -> None:
        async with contextlib.aclosing(looks(lambda: (self._path,), self._poll_seconds, self._asked)) as moments:
            async for _ in moments:
                await self._look_at_file()

    async def _look_at_file(self) -> None:
        loop, pool = asyncio.get_running_loop(), self._cache.environment.load_pool
        found = await loop.run_in_executor(pool, identity, self._path)
        if found == self._looked_at:
            return
        self._looked_at = found
        try:
            declaration = await loop.run_in_executor(pool, read, self._path)
        except SlotcarError as error:
            self._refuse(Cause.of(error))
        except Exception:
            _log.exception("%s cannot be read", self._path)
            self._refuse(Cause.of(InternalError()))
        else:
            self._accept(declaration)

    def _accept(self, declaration: Declaration) -> None:
        self._observer.desired_file(in_force=True)
        is_new, was_refused = declaration.version != self._version, self._cause is not None
        self._cause = None
        if is_new:
            desired = declaration.desired
            self._version, self._prune, self._is_settled = declaration.version, desired.prune, False
            self._dirty |= self._table.declare(desired, self._world.now)
            self._wake.set()
            for each in desired.malformed:
                self._observer.desired_failed(each.cause.reason)
        if is_new or was_refused:
            self._tell_declared(declaration)

    def _tell_declared(self, declaration: Declaration) -> None:
        malformed = declaration.desired.malformed
        said = f"{len(declaration.desired.wants)} adapters, version {declaration.version[:19]}"
        if malformed:
            said += f"; malformed: {listed([each.cause.message for each in malformed], _MAX_LIST_BYTES)}"
        self._cache.tell(EventKind.DECLARED, reason=said)

    def _refuse(self, cause: Cause) -> None:
        """The set before stays in force."""
        self._observer.desired_file(in_force=False)
        if cause != self._cause:
            self._cause = cause
            self._observer.desired_failed(cause.reason)
            stays = f"version {self._version[:19]} stays in force" if self._version else "nothing is declared yet"
            self._cache.tell(EventKind.DECLARED, reason=f"{cause.reason}: {cause.message}; {stays}")

    # The entries

    async def _reconcile(self) -> None:
        poll_at = self._world.now
        while True:
            now = self._world.now
            names = self._dirty | self._table.due(now)
            if self._may_help:
                names |= self._table.waiting_for(Reason.SLOTS_EXHAUSTED) | self._table.waiting_for(Reason.MODEL_UNKNOWN)
            if now >= poll_at:
                names |= self._table.names
                poll_at = now + self._poll_seconds
            self._dirty, self._may_help = set(), False
            self._wake.clear()
            self._step(names)
            wake_at = min(poll_at, self._table.next_due or poll_at)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wake_at - now)):
                    await self._wake.wait()

    def _step(self, names: set[AdapterName]) -> None:
        """Names and keeps that must go, go at once, so that what is to be loaded has their room."""
        while names:
            actions = self._table.judge(names, self._world)
            names = set()
            for action in actions:
                if isinstance(action, Load | Look):
                    self._lanes[self._steps.is_remote(action.want)].add(action)
                    continue
                names.add(action.name)
                if isinstance(action, Unload):
                    self._cache.unload(AdapterRef(action.name), force=False)
                elif isinstance(action, Release):
                    self._cache.release_keep(AdapterRef(action.name))
        for lane in self._lanes.values():
            self._start(lane)
        self._observer.desired_entries(self._table.counts())
        if not self._is_settled and self._table.is_settled:
            self._is_settled = True
            self._observer.desired_settled(self._world.now - self._table.declared_at)

    def _start(self, lane: Lane) -> None:
        while (action := lane.take()) is not None:
            if self._table.begin(action):
                task = asyncio.create_task(self._act(action, lane))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                lane.done()
                self._soon(action.want.name)

    async def _act(self, action: Load | Look, lane: Lane) -> None:
        step = self._steps.load if isinstance(action, Load) else self._steps.look
        try:
            outcome = await step(action.want)
        except ShuttingDown:
            return  # and nothing of the lane goes on
        self._table.end(action, outcome, self._world.now)
        lane.done()
        self._soon(action.want.name)

    def _soon(self, name: AdapterName) -> None:
        self._dirty.add(name)
        self._wake.set()

    def _happened(self, event: Event) -> None:
        if event.kind in _OWN:
            return
        if event.name is not None:
            self._soon(event.name)
        if event.kind in _MAY_HELP and not self._may_help:
            self._may_help = True
            self._wake.set()

    def _entry_changed(self, entry: Entry) -> None:
        name, digest, cause = entry.want.name, entry.digest, entry.cause
        if cause is not None:
            self._observer.desired_failed(cause.reason)
        reason = f"{entry.state}: {cause.reason}: {cause.message}" if cause else str(entry.state)
        self._cache.tell(EventKind.RECONCILED, name=name, digest=digest, reason=reason)
