"""One thread that serves channels: it sleeps until one of them rings, and takes their requests in turns.

Invariant: whatever a client does, the thread does not end, and blocks on none but in `ring`, from where the owner can
call it back; what ends is the client's channel.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from slotcar.shm.region import Kind, Status

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.cache.threads import Tell
from slotcar_sidecar.core.errors import InternalError, LayoutStale, RequestInvalid, SlotcarError
from slotcar_sidecar.core.tally import ForwardTally
from slotcar_sidecar.ring.channel import Channel, Garbage
from slotcar_sidecar.ring.forwards import ChannelForwards
from slotcar_sidecar.ring.refusals import to_payload

_log = logging.getLogger("slotcar.ring")

_TURN_CALLS = 8  # that one channel gets before the next
_MOST_EVENTS = 64
_FORWARD, _ERROR = int(Kind.FORWARD), int(Status.ERROR)
_HANDED_OVER = frozenset(Kind) - {Kind.FORWARD}


class Asked(NamedTuple):
    """A request that the owner answers."""

    cell: int
    sequence: int
    kind: int
    payload: bytes


class Owner(Protocol):
    """Whom the thread tells what happens; called in the owner's thread."""

    def begin(self, channel: Channel, asked: Asked) -> None:
        """Answers a request when its time has come, by `RingThread.answer`."""

    def lost(self, channel: Channel, why: str) -> None:
        """The channel can be served no more: it is to be ended."""

    def closed(self, channel: Channel) -> None:
        """Nothing of the channel is left."""


class RingThread:
    """`ringing` is the channel whose client is being woken right now."""

    def __init__(self, cache: AdapterCache, owner: Owner, tell: Tell) -> None:
        """In the owner's thread; `tell` runs what it is given soon in that thread."""
        self._cache = cache
        self._owner = owner
        self._tell = tell
        self._clock = cache.environment.clock
        self._forwards = cache.in_thread(tell)
        self._tally: ForwardTally = cache.environment.observer.begin_tally("ring")
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Edge-triggered: each ring is seen once, without a read, which a client could make block by reading first.
        self._epoll.register(self._wake, select.EPOLLIN | select.EPOLLET)
        self._posts: deque[Callable[[], object]] = deque()
        self._served: dict[Channel, ChannelForwards] = {}
        self._doorbells: dict[int, ChannelForwards] = {}
        self._links: dict[int, ChannelForwards] = {}
        self._ready: dict[ChannelForwards, None] = {}
        self._stopped = False
        self.ringing: Channel | None = None

    # In the owner's thread

    def add(self, channel: Channel) -> None:
        """Serves the channel from now on."""
        self._post(partial(self._add, channel))

    def answer(self, channel: Channel, asked: Asked, status: Status, payload: bytes) -> None:
        """Answers what it told the owner to begin; nothing happens when the channel is gone by then."""
        self._post(partial(self._answer, channel, asked, int(status), payload))

    def drop(self, channel: Channel) -> None:
        """Gives the channel back, which the owner has ended, when no Forward of it is under way any more."""
        self._post(partial(self._drop, channel))

    def stop(self) -> None:
        """Gives all channels back and ends `run`."""
        self._post(self._stop)

    def close(self) -> None:
        """After the end of `run`."""
        self._cache.end_thread(self._forwards)
        self._cache.environment.observer.end_tally("ring", self._tally)
        self._epoll.close()
        os.close(self._wake)

    def _post(self, call: Callable[[], object]) -> None:
        self._posts.append(call)
        os.eventfd_write(self._wake, 1)

    # In the thread

    def run(self) -> None:
        """Serves until it is told to stop."""
        try:
            while not self._stopped:
                self.turn()
        finally:
            for channel in tuple(self._served):
                channel.end()
                self._drop(channel)

    def turn(self, timeout_seconds: float = -1) -> None:
        """Waits until something is to be done, and does a part of it for each channel."""
        events = self._epoll.poll(0 if self._ready else timeout_seconds, _MOST_EVENTS)
        received = self._clock()
        for descriptor, _ in events:
            served = self._doorbells.get(descriptor)
            if served is not None:
                self._ready[served] = None
            elif descriptor in self._links:
                self._look_at(self._links[descriptor])
        while self._posts:
            self._run(self._posts.popleft())
        for served in tuple(self._ready):
            if not self._serve(served, received):
                self._ready.pop(served, None)

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            _log.exception("fault in a thread of rings")

    def _add(self, channel: Channel) -> None:
        served = ChannelForwards(channel, self._forwards, self._cache)
        self._served[channel] = served
        self._doorbells[channel.doorbell] = served
        self._links[channel.connection.fileno()] = served
        self._epoll.register(channel.doorbell, select.EPOLLIN | select.EPOLLET)
        self._epoll.register(channel.connection.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def _look_at(self, served: ChannelForwards) -> None:
        """The other side of the connection is gone, or has sent what it may not; or it was another of that number."""
        try:
            data = served.channel.connection.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(served, f"its connection broke: {error.strerror}")
        else:
            self._lose(served, "its client sent something after the hand-shake" if data else "its client is gone")

    def _serve(self, served: ChannelForwards, received: float) -> bool:
        """Answers some requests of a channel; True when more of them wait."""
        channel = served.channel
        try:
            pending = channel.pending()
            for _ in range(min(pending, _TURN_CALLS)):
                self._take(served, received)
        except Garbage as fault:
            self._lose(served, str(fault))
        except Exception:
            _log.exception("fault in a ring")
            self._lose(served, "a fault of slotcar itself")
        else:
            return pending > _TURN_CALLS
        return False

    def _take(self, served: ChannelForwards, received: float) -> None:
        channel = served.channel
        cell, sequence, kind, payload = channel.take()
        if payload is None or not (kind == _FORWARD or kind in _HANDED_OVER):
            found = f"sequence {sequence}, kind {kind}, {'a' if payload is None else 'no'} payload out of bounds"
            wanted = f"a sequence, a kind from 1 to {len(Kind)}, at most {channel.geometry.payload_bytes} bytes"
            self._refuse(channel, cell, sequence, RequestInvalid("request", found=found, wanted=wanted))
        elif kind == _FORWARD:
            self._forward(served, cell, sequence, payload, received)
        else:
            channel.unanswered.add(cell)
            self._tell(partial(self._owner.begin, channel, Asked(cell, sequence, kind, payload)))

    def _forward(self, served: ChannelForwards, cell: int, sequence: int, payload: bytes, received: float) -> None:
        channel, clock = served.channel, self._clock
        try:
            prepared, fingerprint = served.prepared(payload)
            start = clock()
            layout = self._forwards.execute(prepared)
        except Exception as error:
            self._refuse_forward(channel, cell, sequence, error, received)
            return
        end = clock()
        queued, computed = int((start - received) * 1e9), int((end - start) * 1e9)
        channel.answer_forward(cell, sequence, layout.generation, fingerprint, queued, computed)
        self._ring(channel)
        self._tally.add(end - received, "OK", prepared.work, start - received)

    def _refuse_forward(self, channel: Channel, cell: int, sequence: int, error: Exception, received: float) -> None:
        """Not where the error passed by: a frame that its traceback leads to may not keep it, or both would stay."""
        known = self._known(channel, error)
        self._tally.add(self._clock() - received, known.reason.value)
        self._refuse(channel, cell, sequence, known)

    def _known(self, channel: Channel, error: Exception) -> SlotcarError:
        """The refusal, or InternalError, with the fault in the log."""
        if isinstance(error, LayoutStale):
            self._forwards.is_stale(channel.terms.session.session_id, error)
        if isinstance(error, SlotcarError):
            return error
        _log.error("fault in a Forward", exc_info=error)
        return InternalError()

    def _refuse(self, channel: Channel, cell: int, sequence: int, error: SlotcarError) -> None:
        payload = to_payload(error, channel.geometry.payload_bytes)
        channel.answer(cell, sequence, _ERROR, payload, self._cache.layout.generation)
        self._ring(channel)

    def _answer(self, channel: Channel, asked: Asked, status: int, payload: bytes) -> None:
        if channel in self._served and not channel.is_over:
            channel.answer(asked.cell, asked.sequence, status, payload, self._cache.layout.generation)
            self._ring(channel)

    def _ring(self, channel: Channel) -> None:
        self.ringing = channel
        try:
            channel.ring()
        except InterruptedError:  # the owner called the thread back
            served = self._served.get(channel)
            if served is not None:
                self._lose(served, "its doorbell kept the thread waiting")
        finally:
            self.ringing = None

    # The end of a channel

    def _lose(self, served: ChannelForwards, why: str) -> None:
        """Serves the channel no more, and tells the owner, who drops it."""
        self._forget(served)
        self._tell(partial(self._owner.lost, served.channel, why))

    def _forget(self, served: ChannelForwards) -> None:
        channel = served.channel
        self._ready.pop(served, None)
        if self._doorbells.pop(channel.doorbell, None) is not None:
            del self._links[channel.connection.fileno()]
            # A descriptor that the client has too stays in the set when it is closed here.
            self._epoll.unregister(channel.doorbell)
            self._epoll.unregister(channel.connection.fileno())

    def _drop(self, channel: Channel) -> None:
        served = self._served.pop(channel)
        self._forget(served)
        served.forget()
        self._ring(channel)
        channel.close()
        self._tell(partial(self._owner.closed, channel))

    def _stop(self) -> None:
        self._stopped = True
