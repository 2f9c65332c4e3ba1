"""A raw client of the hand-shake and of a region: it checks nothing and recovers from nothing."""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
from array import array
from pathlib import Path
from typing import NamedTuple

from slotcar.shm import region
from slotcar.shm.handshake import MAX_DESCRIPTORS, MESSAGE_BYTES, SUFFIX
from slotcar.v1 import error_pb2, plane_pb2

ARENA_BYTES = 32 << 20
PLANES = {"ring": plane_pb2.PLANE_RING, "direct": plane_pb2.PLANE_DIRECT}


class Refused(Exception):
    """The sidecar answered with an Error."""

    def __init__(self, error: error_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error


class Gone(Exception):
    """The connection is over, or there never was one."""


class Answer(NamedTuple):
    """What stands in a cell's answer; `payload` is the response message, nothing for a Forward."""

    payload: bytes
    generation: int
    fingerprint: int
    queue_nanos: int
    compute_nanos: int


def hello(session: str, plane: str, rank: int = 0, **fields: object) -> plane_pb2.PlaneHello:
    """A sound hello; `fields` replace its fields."""
    sound = {
        "session": session,
        "rank": rank,
        "plane": PLANES[plane],
        "arena_bytes": ARENA_BYTES,
        "layout_version": region.VERSION,
    }
    return plane_pb2.PlaneHello(**sound | fields)


def shake_hands(target: str, message: bytes, timeout_seconds: float) -> tuple[socket.socket, bytes, list[int]]:
    """Sends `message`; returns the connection, the sidecar's message, and the descriptors that came with it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_seconds)
    try:
        connection.connect(str(Path(target.removeprefix("unix://"))) + SUFFIX)
        connection.send(message)
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
        data, ancillary, _, _ = connection.recvmsg(MESSAGE_BYTES, room)
    except OSError as error:
        connection.close()
        raise Gone(str(error)) from error
    descriptors = array("i")
    for _, _, numbers in ancillary:
        descriptors.frombytes(numbers)
    return connection, data, list(descriptors)


class Connection:
    """One region, used by one thread at a time."""

    def __init__(self, target: str, request: plane_pb2.PlaneHello, timeout_seconds: float = 30.0) -> None:
        """Raises Refused or Gone."""
        self._timeout_seconds = timeout_seconds
        self.lock = threading.Lock()
        self.socket, data, self.descriptors = shake_hands(target, request.SerializeToString(), timeout_seconds)
        welcome = plane_pb2.PlaneWelcome.FromString(data)
        if welcome.WhichOneof("result") != "opened":
            self.close()
            raise Refused(welcome.error) if welcome.HasField("error") else Gone("no welcome")
        self.opened = welcome.opened
        self.memory = mmap.mmap(self.descriptors[0], self.opened.region_bytes)
        self.view = memoryview(self.memory)
        self.geometry, self.epoch = region.RegionGeometry.read(self.view)
        self.arena = self.view[self.geometry.arena_offset :]
        self._submitted = 0

    @property
    def is_over(self) -> bool:
        (closed,) = region.WORD.unpack_from(self.view, region.CLOSED_OFFSET)
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(closed or poll.poll(0))

    def ask(self, kind: int, payload: bytes) -> Answer:
        """Raises Refused or Gone."""
        cell, sequence = self._submitted % self.geometry.cells, self._submitted + 1
        self.submit(cell, sequence, kind, payload)
        return self.wait(cell, sequence)

    def submit(self, cell: int, sequence: int, kind: int, payload: bytes, length: int | None = None) -> None:
        """Writes a request and rings, without a look at what stands in the cell."""
        at = self.geometry.request_payload_offset(cell)
        self.view[at : at + len(payload)] = payload
        size = len(payload) if length is None else length
        region.REQUEST.pack_into(self.view, self.geometry.request_offset(cell), sequence, kind, size)
        region.INDEX.pack_into(self.view, self.geometry.submission_offset(self._submitted), cell)
        self._submitted += 1
        # In one store: struct would write zeros first.
        self.view.cast("Q")[region.SUBMITTED_OFFSET // region.WORD.size] = self._submitted
        self.ring()

    def ring(self) -> None:
        os.eventfd_write(self.descriptors[1], 1)

    def wait(self, cell: int, sequence: int) -> Answer:
        """The answer in a cell. Raises Refused or Gone."""
        poll = select.poll()
        poll.register(self.descriptors[2], select.POLLIN)
        poll.register(self.socket, select.POLLIN)
        at = self.geometry.answer_offset(cell)
        while region.WORD.unpack_from(self.view, at) != (sequence,):
            ready = dict(poll.poll(self._timeout_seconds * 1000))
            if self.descriptors[2] in ready:
                os.eventfd_read(self.descriptors[2])
            elif not ready or self.socket.fileno() in ready:
                raise Gone("no answer" if not ready else "the connection ended")
        status, length, *rest = region.ANSWER.unpack_from(self.view, at + region.WORD.size)
        start = self.geometry.answer_payload_offset(cell)
        payload = bytes(self.view[start : start + length])
        if status == region.Status.ERROR:
            raise Refused(error_pb2.Error.FromString(payload))
        return Answer(payload, *rest)

    def close(self) -> None:
        """Ends the connection; the memory goes with the last view of it."""
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
