"""One client's region as the sidecar sees it: each request is read once, and nothing that stands there is believed.

Invariant: one thread takes requests, writes answers, rings and closes. The owner's thread reads the uses and, at the
end, writes the closed word and shuts the connection, none of which can block.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from dataclasses import dataclass

from slotcar.shm import region
from slotcar.shm.region import RegionGeometry

from slotcar_sidecar.core.errors import CapacityExceeded
from slotcar_sidecar.core.sealed_memory import sealed_memory
from slotcar_sidecar.core.session import Session

_WORD = region.WORD.size
_CLOSED = region.CLOSED_OFFSET // _WORD
_SUBMITTED = region.SUBMITTED_OFFSET // _WORD
_unpack_index = region.INDEX.unpack_from
_unpack_request = region.REQUEST.unpack_from
_pack_answer = region.ANSWER.pack_into


class Garbage(Exception):
    """The client broke the layout so that there is no cell to answer in; the message says how."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Whose channel it is: a rank of a session, and the plane that the client asked for."""

    session: Session
    rank: int
    plane: str


class Channel:
    """`taken` requests so far; `unanswered` are the cells of those that the owner answers later.

    `is_deaf`: its client made `ring` block once, and is woken no more. `is_over`: the owner has ended it.
    """

    __slots__ = (
        "_answers",
        "_cells",
        "_payload_bytes",
        "_region",
        "_requests",
        "_submissions",
        "_words",
        "arena",
        "bell",
        "connection",
        "doorbell",
        "geometry",
        "is_deaf",
        "is_over",
        "memory",
        "taken",
        "terms",
        "unanswered",
    )

    def __init__(self, terms: Terms, geometry: RegionGeometry, epoch: str, connection: socket.socket) -> None:
        """Takes the connection, to close it. Raises CapacityExceeded."""
        self.terms = terms
        self.geometry = geometry
        self.connection = connection
        self._region, self.memory = sealed_memory("slotcar-region", geometry.total_bytes, mmap.mmap, writable=True)
        try:
            self.doorbell, self.bell = _doorbells()
        except CapacityExceeded:
            self.forget_region()
            raise
        header = geometry.header(epoch)
        self.memory[: len(header)] = header
        view = memoryview(self.memory)
        self._words = view.cast("Q")
        self.arena = view[geometry.arena_offset : geometry.arena_offset + geometry.arena_bytes]
        self._cells, self._payload_bytes = geometry.cells, geometry.payload_bytes
        cells = range(geometry.cells)
        self._submissions = tuple(map(geometry.submission_offset, cells))
        self._requests = tuple((geometry.request_offset(c), geometry.request_payload_offset(c)) for c in cells)
        self._answers = tuple((geometry.answer_offset(c), geometry.answer_payload_offset(c)) for c in cells)
        self.taken = 0
        self.unanswered: set[int] = set()
        self.is_deaf = False
        self.is_over = False

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """What the client gets: the region, the eventfd that wakes the sidecar, the one that wakes the client."""
        return self._region, self.doorbell, self.bell

    def forget_region(self) -> None:
        """The client has its descriptor of the region; here the mapping is enough."""
        os.close(self._region)
        self._region = -1

    # In the channel's thread

    def pending(self) -> int:
        """How many requests wait to be taken, at most as many as there are cells. Raises Garbage."""
        submitted = self._words[_SUBMITTED]
        if not submitted:  # at the beginning, or while it is written
            return 0
        pending = submitted - self.taken
        if 0 <= pending <= self._cells:
            return pending
        raise Garbage(f"it submitted {submitted} calls, wanted {self.taken} to {self.taken + self._cells}")

    def take(self) -> tuple[int, int, int, bytes | None]:
        """Cell, sequence, kind and payload of the next request; None for a payload that cannot be. Raises Garbage."""
        memory, taken = self.memory, self.taken
        (cell,) = _unpack_index(memory, self._submissions[taken % self._cells])
        if cell >= self._cells or cell in self.unanswered:
            raise Garbage(f"call {taken} is in cell {cell}, wanted one below {self._cells} that is not the sidecar's")
        self.taken = taken + 1
        header, start = self._requests[cell]
        sequence, kind, size = _unpack_request(memory, header)
        if size > self._payload_bytes or not sequence:
            return cell, sequence, kind, None
        return cell, sequence, kind, memory[start : start + size]

    def answer_forward(
        self, cell: int, sequence: int, generation: int, fingerprint: int, queue_nanos: int, compute_nanos: int
    ) -> None:
        """The outputs are in the arena."""
        at = self._answers[cell][0]
        _pack_answer(self.memory, at + _WORD, 0, 0, generation, fingerprint, queue_nanos, compute_nanos)
        self._words[at // _WORD] = sequence

    def answer(self, cell: int, sequence: int, status: int, payload: bytes, generation: int) -> None:
        """Raises ValueError when the payload does not fit."""
        at, start = self._answers[cell]
        if len(payload) > self._payload_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes, wanted at most {self._payload_bytes}")
        self.memory[start : start + len(payload)] = payload
        _pack_answer(self.memory, at + _WORD, status, len(payload), generation, 0, 0, 0)
        self.unanswered.discard(cell)
        self._words[at // _WORD] = sequence

    def ring(self) -> None:
        """Wakes the client, which may keep the call from returning: the two share what says that writes do not block.

        Raises InterruptedError when the thread was called back.
        """
        if self.is_deaf:
            return
        try:
            os.eventfd_write(self.bell, 1)
        except BlockingIOError:
            return  # it did not look for 2^64 rings: one more would say nothing new
        except InterruptedError:
            self.is_deaf = True
            raise

    def close(self) -> None:
        """Gives everything back; nobody uses the channel any more."""
        self.arena.release()
        self._words.release()
        with contextlib.suppress(BufferError):  # goes with the last tensor over it
            self.memory.close()
        self.connection.close()
        os.close(self.doorbell)
        os.close(self.bell)
        if self._region >= 0:
            self.forget_region()

    # In the owner's thread

    def end(self) -> None:
        """The client sees at once that nothing is served any more. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        self._words[_CLOSED] = 1
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def uses(self) -> bytes:
        """The bytes of all uses now."""
        start = self.geometry.uses_offset
        return self.memory[start : start + region.USE.size * self.geometry.uses]


def _doorbells() -> tuple[int, int]:
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    try:
        first = os.eventfd(0, flags)
        try:
            return first, os.eventfd(0, flags)
        except OSError:
            os.close(first)
            raise
    except OSError as error:
        raise CapacityExceeded(f"this process can open no more descriptors: {error.strerror}") from error
