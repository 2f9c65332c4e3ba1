"""The calls of one connection: which cell of the region each is in, and how long it has to stay there.

Invariant: a cell, with its block of the arena, is nobody else's from before its call is submitted until the answer is
there, however long that takes: a late answer is never taken for another call's, and nothing late is written into what
belongs to a newer call.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

from google.protobuf.message import DecodeError
from slotcar.shm.region import (
    ANSWER,
    INDEX,
    REQUEST,
    SUBMISSIONS_OFFSET,
    SUBMITTED_OFFSET,
    WORD,
    Kind,
    RegionGeometry,
    Status,
)
from slotcar.v1 import error_pb2

from slotcar_client.errors import (
    AuditFailed,
    CapacityExceeded,
    DeadlineExceeded,
    SlotcarError,
    Unavailable,
    from_message,
)
from slotcar_client.transports.arena import Arena
from slotcar_client.transports.connection import Connection

_SUBMITTED = SUBMITTED_OFFSET // WORD.size
_NO_BLOCK = (0, 0)


class _Cell(NamedTuple):
    """Where the parts of a cell are: offsets of bytes; `answered` is the index of the word that an answer sets last."""

    number: int
    request: int
    payload: int
    answer: int
    answer_payload: int
    answered: int


class ConnectionLost(Unavailable):
    """The connection ended before the answer was there; the call may be repeated over another."""


class Asked:
    """A cell that is taken, and its block of the arena. `sequence` is 0 until the call is submitted."""

    __slots__ = ("block", "cell", "sequence")

    def __init__(self, cell: _Cell, block: tuple[int, int]) -> None:
        self.cell = cell
        self.block = block
        self.sequence = 0


class Unawaited(Protocol):
    """A call that nobody waits for yet."""

    def settle(self, timeout_seconds: float) -> bool:
        """Waits for the answer and takes it out of its cell, or gives the cell up; False when no answer came."""


class Cells:
    """Takes a cell, submits, waits, reads, gives back. `ahead` are the calls that nobody waits for yet, in order."""

    def __init__(self, connection: Connection) -> None:
        geometry = connection.geometry
        self.connection = connection
        self.ahead: deque[Unawaited] = deque()
        self.payload_bytes = geometry.payload_bytes
        self.arena = Arena(geometry.arena_bytes)
        self._cells = [_cell(geometry, number) for number in range(geometry.cells)]
        self._region = connection.region
        self._words = connection.words
        self._free = (1 << geometry.cells) - 1
        self._lost: list[Asked] = []
        self._submitted = 0
        self._payloads: list[bytes | None] = [None] * geometry.cells

    def take(self, size: int, timeout_seconds: float) -> Asked:
        """A cell with a block of `size` bytes, once there is one: it waits for the calls ahead, the oldest first.

        Raises CapacityExceeded when there will never be room for it, DeadlineExceeded, or ConnectionLost, also when all
        the room is waiting for answers that nobody wants any more.
        """
        if self._lost:
            self._find_lost()
        while (asked := self._take(size)) is None:
            if size > self.arena.size:
                raise CapacityExceeded(
                    f"a call of {size} bytes is larger than the arena, {self.arena.size}: send fewer rows, or open the "
                    "session with larger arena_bytes",
                    found=size,
                    wanted=self.arena.size,
                )
            if not self.ahead:
                raise ConnectionLost("every cell waits for an answer that is late")
            if not self.ahead.popleft().settle(timeout_seconds):
                raise self._silence(timeout_seconds)
        return asked

    def _take(self, size: int) -> Asked | None:
        lowest = self._free & -self._free
        if not lowest:
            return None
        block = self.arena.take(size) if size else _NO_BLOCK
        if block is None:
            return None
        self._free ^= lowest
        return Asked(self._cells[lowest.bit_length() - 1], block)

    def submit(self, asked: Asked, kind: Kind, payload: bytes) -> None:
        """Hands the call over. `payload` fits. Raises ConnectionLost."""
        region, cell, number = self._region, asked.cell, self._submitted
        if self._payloads[cell.number] is not payload:
            region[cell.payload : cell.payload + len(payload)] = payload
            self._payloads[cell.number] = payload
        self._submitted = asked.sequence = number + 1
        REQUEST.pack_into(region, cell.request, number + 1, kind, len(payload))
        INDEX.pack_into(region, SUBMISSIONS_OFFSET + INDEX.size * (number % len(self._cells)), cell.number)
        self._words[_SUBMITTED] = number + 1
        try:
            self.connection.ring()
        except Unavailable as error:
            raise ConnectionLost(error.message) from error

    def has_answer(self, asked: Asked) -> bool:
        return self._words[asked.cell.answered] == asked.sequence

    def wait(self, asked: Asked, timeout_seconds: float) -> int:
        """Returns the fingerprint when a call that was submitted was answered. Raises the error that it was answered
        with, DeadlineExceeded, ConnectionLost or AuditFailed."""
        words, answered, sequence = self._words, asked.cell.answered, asked.sequence
        connection, deadline = self.connection, time.monotonic() + timeout_seconds
        while words[answered] != sequence:
            if connection.ended or not connection.wait(max(deadline - time.monotonic(), 0.0)):
                raise self._silence(timeout_seconds)
        status, _, _, fingerprint, _, _ = ANSWER.unpack_from(self._region, asked.cell.answer)
        if status:
            raise self._refusal(asked)
        return int(fingerprint)

    def _silence(self, timeout_seconds: float) -> SlotcarError:
        if self.connection.ended:
            return ConnectionLost("the sidecar is gone, or ended the connection, before it answered")
        return DeadlineExceeded(f"no answer within {timeout_seconds:g} s")

    def payload(self, asked: Asked) -> bytes:
        """The response in the answer of a call. Raises AuditFailed."""
        _, size, *_ = ANSWER.unpack_from(self._region, asked.cell.answer)
        if size > self.payload_bytes:
            raise AuditFailed(
                f"the answer's payload has {size} bytes, a cell only {self.payload_bytes}",
                found=size,
                wanted=self.payload_bytes,
            )
        return self._region[asked.cell.answer_payload : asked.cell.answer_payload + size]

    def _refusal(self, asked: Asked) -> SlotcarError:
        status, *_ = ANSWER.unpack_from(self._region, asked.cell.answer)
        if status != Status.ERROR:
            return AuditFailed(f"the answer's status is {status}", found=status, wanted="0 or 1")
        payload = self.payload(asked)
        try:
            return from_message(error_pb2.Error.FromString(payload))
        except DecodeError:
            return AuditFailed("the answer is an error that is no Error message", found=payload[:64])

    def give_back(self, asked: Asked) -> None:
        """Nobody wants the cell any more; it is free when its answer is there, or when nothing was submitted."""
        if asked.sequence and not self.has_answer(asked):
            self._lost.append(asked)
            return
        self._free |= 1 << asked.cell.number
        if asked.block is not _NO_BLOCK:
            self.arena.give_back(asked.block)

    def wanted(self, call: Unawaited) -> None:
        """Somebody waits for the call now."""
        if call in self.ahead:
            self.ahead.remove(call)

    def close(self) -> None:
        """Ends the connection; whoever sent a call ahead may still take an answer that is there. Idempotent."""
        self.connection.close()
        self.ahead.clear()

    def _find_lost(self) -> None:
        """Frees the cells of calls that nobody waits for and whose answers are there now."""
        lost, self._lost = self._lost, []
        for asked in lost:
            self.give_back(asked)


def _cell(geometry: RegionGeometry, number: int) -> _Cell:
    answered = geometry.answer_offset(number)
    return _Cell(
        number=number,
        request=geometry.request_offset(number),
        payload=geometry.request_payload_offset(number),
        answer=answered + WORD.size,
        answer_payload=geometry.answer_payload_offset(number),
        answered=answered // WORD.size,
    )
