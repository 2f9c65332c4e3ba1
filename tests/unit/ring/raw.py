"""A client of the planes in shared memory without a client library: it writes what it is told to, sound or not."""

from __future__ import annotations

import mmap
import os
import socket
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from slotcar.shm import region
from slotcar.shm.handshake import MAX_DESCRIPTORS, MESSAGE_BYTES
from slotcar.shm.region import Forward, Item, RegionGeometry, Status
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import error_pb2, plane_pb2

PLANES = {"ring": plane_pb2.PLANE_RING, "direct": plane_pb2.PLANE_DIRECT}
ARENA_BYTES = 1 << 16


class Refused(Exception):
    """The hand-shake or a call was answered with an Error."""

    def __init__(self, error: error_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error
        self.reason = error_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")


class Answer(NamedTuple):
    """What stands in the answer of a cell."""

    sequence: int
    status: int
    payload: bytes
    generation: int
    fingerprint: int


def hello(session: object, offer: str = "ring", **fields: Any) -> bytes:
    """A sound hello; `fields` replace its fields."""
    sound = {
        "session": str(session),
        "plane": PLANES[offer],
        "arena_bytes": ARENA_BYTES,
        "layout_version": region.VERSION,
    }
    return plane_pb2.PlaneHello(**sound | fields).SerializeToString()


class RawClient:
    """Connects and says `message`; `welcome` takes the answer."""

    def __init__(self, path: Path, message: bytes) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptors: list[int] = []
        self.submitted = 0
        self.connection.connect(str(path))
        self.connection.send(message)

    def welcome(self, timeout_seconds: float = 30.0) -> Self:
        """Maps the region. Raises Refused, or EOFError when the connection was ended without an answer."""
        self.connection.settimeout(timeout_seconds)
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
        data, ancillary, _, _ = self.connection.recvmsg(MESSAGE_BYTES, room)
        numbers = array("i")
        for _, _, content in ancillary:
            numbers.frombytes(content)
        self.descriptors = list(numbers)
        if not data:
            raise EOFError
        welcome = plane_pb2.PlaneWelcome.FromString(data)
        if welcome.HasField("error"):
            raise Refused(welcome.error)
        self.opened = welcome.opened
        self.memory = mmap.mmap(self.descriptors[0], self.opened.region_bytes)
        self.words = memoryview(self.memory).cast("Q")
        self.geometry, self.epoch = RegionGeometry.read(memoryview(self.memory))
        return self

    # The region

    @property
    def is_closed(self) -> bool:
        return bool(self.words[region.CLOSED_OFFSET // 8])

    @property
    def is_gone(self) -> bool:
        """The sidecar has ended the connection."""
        self.connection.setblocking(False)
        try:
            return not self.connection.recv(1)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def put(self, offset: int, values: np.ndarray) -> None:
        """Writes an array into the arena."""
        start = self.geometry.arena_offset + offset
        self.memory[start : start + values.nbytes] = values.tobytes()

    def get(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """A float32 array in the arena."""
        count = int(np.prod(shape))
        start = self.geometry.arena_offset + offset
        return np.frombuffer(self.memory[start : start + 4 * count], dtype=np.float32).reshape(shape)

    def fill(self, cell: int, sequence: int, kind: int, payload: bytes) -> None:
        """A request, not submitted."""
        start = self.geometry.request_payload_offset(cell)
        self.memory[start : start + len(payload)] = payload
        region.REQUEST.pack_into(self.memory, self.geometry.request_offset(cell), sequence, kind, len(payload))

    def submit(self, cell: int) -> None:
        """Names the cell as the next call's; the doorbell is still to ring."""
        region.INDEX.pack_into(self.memory, self.geometry.submission_offset(self.submitted), cell)
        self.submitted += 1
        self.words[region.SUBMITTED_OFFSET // 8] = self.submitted

    def ring(self) -> None:
        os.eventfd_write(self.descriptors[1], 1)

    def send(self, kind: int, payload: bytes, cell: int | None = None) -> int:
        """A whole call; returns its cell, whose answer has the number of the call as its sequence."""
        cell = self.submitted % self.geometry.cells if cell is None else cell
        self.fill(cell, self.submitted + 1, kind, payload)
        self.submit(cell)
        self.ring()
        return cell

    def read(self, cell: int) -> Answer:
        """What stands in the answer of a cell now."""
        at = self.geometry.answer_offset(cell)
        (sequence,) = region.WORD.unpack_from(self.memory, at)
        status, size, generation, fingerprint, _, _ = region.ANSWER.unpack_from(self.memory, at + 8)
        start = self.geometry.answer_payload_offset(cell)
        return Answer(sequence, status, self.memory[start : start + size], generation, fingerprint)

    def answer(self, cell: int) -> Answer:
        """The answer to the call that was sent last in a cell, which must be there. Raises Refused."""
        answer = self.read(cell)
        (sequence,) = region.WORD.unpack_from(self.memory, self.geometry.request_offset(cell))
        assert answer.sequence == sequence, "not answered"
        if answer.status == Status.ERROR:
            raise Refused(error_pb2.Error.FromString(answer.payload))
        return answer

    def rings(self) -> int:
        """How often the doorbell rang since the last look."""
        try:
            return os.eventfd_read(self.descriptors[2])
        except BlockingIOError:
            return 0

    # The end

    def close(self) -> None:
        """Idempotent."""
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        if self.descriptors and hasattr(self, "words"):
            self.words.release()
            self.memory.close()
        self.descriptors = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def mapping_request(*refs: str, mapping_id: int = 1, **fields: Any) -> bytes:
    """An empty ref is the base model."""
    entries = [pb.MappingEntry(ref=ref) if ref else pb.MappingEntry(base=True) for ref in refs]
    return pb.SetMappingRequest(mapping_id=mapping_id, entries=entries, **fields).SerializeToString()


def forward_request(
    generation: int, row_counts: Sequence[int], items: Sequence[Item], mapping_id: int = 1, dtype: int = 0
) -> bytes:
    return Forward(mapping_id, generation, dtype, row_counts, items).pack()
