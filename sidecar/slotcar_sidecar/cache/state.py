"""What the parts of the cache share: the tables, the world around them, and how a change is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

from slotcar_sidecar.cache.waits import Waits
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.events import EventKind, EventLog
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.marks import Marks
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.pins import HoldOwner
from slotcar_sidecar.core.ports import Device, Environment, Limits, Tiers
from slotcar_sidecar.core.residency import Residency
from slotcar_sidecar.core.session import Sessions

T = TypeVar("T")


class State:
    """Read and changed on the event loop's thread only."""

    def __init__(
        self,
        residency: Residency,
        sessions: Sessions,
        tiers: Tiers,
        device: Device,
        environment: Environment,
        limits: Limits,
    ) -> None:
        self.residency = residency
        self.sessions = sessions
        self.tiers = tiers
        self.device = device
        residency.slots.listen(device.publish)
        tiers.disk.when_fault.append(self._note_fault)
        self.environment = environment
        self.waits = Waits(environment)
        self.limits = limits
        self.model: ModelSpec | None = None
        self.marks = Marks()
        self.shutting_down = False
        self.closing = asyncio.Event()
        self.listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._pending_holds: dict[HoldOwner, set[object]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def layout(self) -> Layout:
        return self.residency.layout

    @property
    def events(self) -> EventLog:
        return self.residency.events

    def check_target(self, *, on_disk: bool) -> None:
        """Raises RequestInvalid for bytes that are to stop on a disk that there is not."""
        if on_disk and not self.tiers.disk.capacity_bytes:
            raise RequestInvalid("target_tier", found="TIER_DISK", wanted="another tier, or a server with --disk")

    def check_hold(self, owner: HoldOwner) -> None:
        """Raises SessionNotFound, or CapacityExceeded when the session has all the holds that it may have."""
        self.sessions.get(owner.session)
        holds = self.residency.holds
        self.limits.check_holds(holds.count(owner.session), is_new=holds.get(owner) is None)

    @contextlib.contextmanager
    def pending_hold(self, owner: HoldOwner) -> Iterator[object]:
        """A hold is on its way while its caller waits for it and nobody has released it."""
        token = object()
        self._pending_holds.setdefault(owner, set()).add(token)
        try:
            yield token
        finally:
            self._pending_holds.get(owner, set()).discard(token)
            if not self._pending_holds.get(owner, True):
                del self._pending_holds[owner]

    def is_pending(self, owner: HoldOwner, token: object) -> bool:
        return token in self._pending_holds.get(owner, ())

    def withdraw_holds(self, owner: HoldOwner) -> None:
        """What is on its way for the owner takes no effect any more."""
        self._pending_holds.pop(owner, None)

    def held_digests(self) -> frozenset[Digest]:
        """The digests whose bytes may not leave memory."""
        return self.residency.held_digests(self.tiers.disk.retains)

    def _note_fault(self, digest: Digest | None, what: str) -> None:
        """The disk tier could not do what it should; everything goes on without it."""
        self.events.record(EventKind.STORAGE_FAULT, self.layout.generation, digest=digest, reason=what)
        self.publish()

    def now(self) -> float:
        return self.environment.clock()

    def publish(self) -> None:
        """Tells everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self.listeners:
            listener()

    @property
    def changed(self) -> asyncio.Event:
        """Is set by the next change."""
        return self._changed

    async def run(self, pool: Executor, call: Callable[..., T], *arguments: Any) -> T:
        self.waits.for_pool(pool)
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)

    async def outliving(self, work: Coroutine[Any, Any, T], group: set[asyncio.Task[Any]] | None = None) -> T:
        """Awaits `work`, which goes on to its end when the caller is cancelled; until then `group` has its task."""
        task = asyncio.create_task(work)
        groups = (self._tasks,) if group is None else (self._tasks, group)
        for tasks in groups:
            tasks.add(task)

        def forget(task: asyncio.Task[Any]) -> None:
            for tasks in groups:
                tasks.discard(task)
            if not task.cancelled():
                task.exception()

        task.add_done_callback(forget)
        try:
            return await asyncio.shield(task)
        finally:
            # The traceback of its error leads to this frame: together they, and what was asked for, would stay.
            del task
