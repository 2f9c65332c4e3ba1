"""The connections to shared memory: at most one for each rank of a session, which lives no longer than the session.

Invariant: a channel counts until its thread has given it back, so that memory and descriptors are bounded by the most
that there may be. Everything here runs on the owner's thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slotcar.shm.region import RegionGeometry

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.cache.threads import Tell
from slotcar_sidecar.core.access import Identity
from slotcar_sidecar.core.errors import CapacityExceeded, ModelUnknown, RequestInvalid, ShuttingDown
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.session import Session
from slotcar_sidecar.ring.calls import Calls
from slotcar_sidecar.ring.channel import Channel, Terms
from slotcar_sidecar.ring.thread import Asked, RingThread
from slotcar_sidecar.ring.uses import Uses
from slotcar_sidecar.rpc.access import Access
from slotcar_sidecar.rpc.interceptors import Count

_log = logging.getLogger("slotcar.ring")


@dataclass(frozen=True, slots=True)
class RingLimits:
    """What is offered: the planes, the most bytes of one arena, and the most connections."""

    planes: tuple[str, ...]
    arena_bytes: int
    rings: int


@dataclass(frozen=True, slots=True)
class SlotsDescriptor:
    """The file that clients of the direct plane map, and the memory of a GPU that the weights are in, if not there."""

    descriptor: int
    size_bytes: int
    weights: int | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.descriptor,) if self.weights is None else (self.descriptor, self.weights)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for in the hand-shake, and by what a policy knows its process."""

    session: SessionId
    rank: int
    plane: str
    arena_bytes: int
    identities: frozenset[Identity] = frozenset()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the process gives: `tell` runs what it is given in the owner's thread, `call_back` makes a thread's system
    call return, `count` is told how each call ends. `slots` is the slots file once there is one, or raises why there is
    none; `access`, where there is a policy, who may do what."""

    tell: Tell
    call_back: Callable[[RingThread], None]
    slots: Callable[[], SlotsDescriptor | None]
    count: Count
    access: Access | None = None


@dataclass(slots=True, eq=False)
class _Open:
    """A channel's thread, its calls that the owner answers, and what its client computed by itself."""

    thread: RingThread
    uses: Uses
    identities: frozenset[Identity]
    calls: set[asyncio.Task[Any]] = field(default_factory=set)


class Rings:
    """Opens and ends channels, and answers what is not for their threads; `threads` are to be run by the process."""

    def __init__(self, cache: AdapterCache, limits: RingLimits, threads: int, around: Surroundings) -> None:
        self._cache = cache
        self._limits = limits
        self._around = around
        self._calls = Calls(cache, around.count, around.access)
        self._open: dict[Channel, _Open] = {}
        self._by_rank: dict[tuple[SessionId, int], Channel] = {}
        self._ringing: dict[RingThread, Channel | None] = {}
        self._direct = cache.environment.observer.begin_tally("direct")
        self.threads = tuple(RingThread(cache, self, around.tell) for _ in range(threads))
        cache.when_session_ends.append(self._end_session)
        if around.access is not None:
            around.access.when_replaced.append(self._look_again)

    def __len__(self) -> int:
        """How many channels there are, with those that are being given back."""
        return len(self._open)

    def open(self, wish: Wish, connection: socket.socket) -> Channel:
        """A channel for a client, in the place of an older one of the same rank; it takes the connection.

        Raises SlotcarError; then the connection is still the caller's.
        """
        cache, limits = self._cache, self._limits
        if cache.closed:
            raise ShuttingDown
        session = cache.sessions.get(wish.session)
        session.check_rank(wish.rank)
        if wish.plane not in limits.planes:
            raise RequestInvalid(
                "plane", found=wish.plane, wanted=" or ".join(limits.planes) or "none: none is offered"
            )
        if wish.plane == "direct" and self._around.slots() is None:
            raise ModelUnknown
        if wish.arena_bytes > limits.arena_bytes:
            raise CapacityExceeded(
                f"an arena of {wish.arena_bytes} bytes, the server gives at most {limits.arena_bytes}",
                found=wish.arena_bytes,
                wanted=limits.arena_bytes,
            )
        before = self._by_rank.get((wish.session, wish.rank))
        if len(self) - (before is not None) >= limits.rings:
            raise CapacityExceeded(
                f"the server has {limits.rings} connections to shared memory already",
                found=len(self),
                wanted=limits.rings,
            )
        terms = Terms(session, wish.rank, wish.plane)
        channel = Channel(terms, RegionGeometry(wish.arena_bytes), str(cache.layout.epoch), connection)
        if before is not None:
            self.end(before, "a newer connection took its place")
        self._begin(channel, wish.identities)
        return channel

    def _begin(self, channel: Channel, identities: frozenset[Identity]) -> None:
        terms = channel.terms
        taken = [opened.thread for opened in self._open.values()]
        opened = _Open(min(self.threads, key=taken.count), Uses(self._cache.limits.max_rows), identities)
        self._open[channel] = opened
        self._by_rank[terms.session.session_id, terms.rank] = channel
        terms.session.planes[terms.rank] = terms.plane
        opened.thread.add(channel)
        self._say("plane opened", channel)

    def descriptors(self, channel: Channel) -> tuple[tuple[int, ...], int]:
        """What the client of a channel gets, and the size of the slots file among it; 0 without one."""
        slots = self._around.slots() if channel.terms.plane == "direct" else None
        if slots is None:
            return channel.descriptors, 0
        return (*channel.descriptors, *slots.descriptors), slots.size_bytes

    def end(self, channel: Channel, why: str) -> None:
        """Its client sees it at once; what it has is freed when its Forward has ended. Idempotent."""
        opened = self._open.get(channel)
        if opened is None or channel.is_over:
            return
        self._count_direct(channel, opened)
        channel.end()
        self._forget_rank(channel)
        for task in opened.calls:
            task.cancel()
        opened.thread.drop(channel)
        self._say("plane ended", channel, why=why)

    def _forget_rank(self, channel: Channel) -> None:
        """The channel is its rank's no more, if it was. Idempotent."""
        terms = channel.terms
        key = terms.session.session_id, terms.rank
        if self._by_rank.get(key) is channel:
            del self._by_rank[key]
            del terms.session.planes[terms.rank]

    def _say(self, event: str, channel: Channel, **more: str) -> None:
        terms = channel.terms
        fields = {"session": terms.session.session_id.short, "rank": terms.rank, "plane": terms.plane} | more
        _log.info(event, extra={"fields": fields})

    def _look_again(self) -> None:
        """Ends the channels of processes that are another client now, or nobody's: the policy was replaced."""
        access = self._around.access
        assert access is not None
        for channel, opened in tuple(self._open.items()):
            client = access.policy.find(opened.identities)
            if client is None or client.name != channel.terms.session.terms.owner:
                self.end(channel, "the policy changed")

    def _end_session(self, session: Session) -> None:
        for channel in tuple(self._open):
            if channel.terms.session is session:
                self.end(channel, "its session ended")

    # What threads tell: see thread.Owner

    def begin(self, channel: Channel, asked: Asked) -> None:
        opened = self._open.get(channel)
        if opened is None or channel.is_over:
            return
        task = asyncio.get_running_loop().create_task(self._calls.answer(channel, asked))
        opened.calls.add(task)
        task.add_done_callback(partial(self._answered, channel, opened, asked))

    def _answered(self, channel: Channel, opened: _Open, asked: Asked, task: asyncio.Task[tuple[Any, bytes]]) -> None:
        opened.calls.discard(task)
        if not task.cancelled() and not channel.is_over:
            opened.thread.answer(channel, asked, *task.result())

    def lost(self, channel: Channel, why: str) -> None:
        self.end(channel, why)

    def closed(self, channel: Channel) -> None:
        self._forget_rank(channel)
        self._open.pop(channel, None)

    # Now and then

    def look(self) -> None:
        """Counts what clients of the direct plane computed, and calls back a thread that one keeps from going on."""
        for channel, opened in tuple(self._open.items()):
            if not channel.is_over:
                generations = self._count_direct(channel, opened)
                if generations:
                    self._cache.used_elsewhere(channel.terms.session, generations)
        for thread in self.threads:
            ringing = thread.ringing
            if ringing is not None and ringing is self._ringing.get(thread):
                self._around.call_back(thread)
            self._ringing[thread] = ringing

    def _count_direct(self, channel: Channel, opened: _Open) -> frozenset[int]:
        """Counts what the client computed by itself since the last look; returns the generations of its mappings."""
        if channel.terms.plane != "direct":
            return frozenset()
        grown = opened.uses.look(channel.uses())
        if grown.calls:
            self._direct.add_elsewhere(grown.calls, grown.rows)
        return grown.generations

    # The end

    def close(self) -> None:
        """Ends every channel, and then the threads."""
        for channel in tuple(self._open):
            self.end(channel, "the server closes")
        for thread in self.threads:
            thread.stop()

    def finish(self) -> None:
        """After the end of all threads."""
        for thread in self.threads:
            thread.close()
        self._cache.environment.observer.end_tally("direct", self._direct)
