"""The connection of a plane: its hand-shake, the memory that came of it, a doorbell each way, and signs of life.

Invariant: the memory cannot shrink underneath its readers (it is sealed), and it stays mapped for as long as a view of
it is used, also after `close`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from google.protobuf.message import DecodeError
from slotcar.shm.handshake import MAX_DESCRIPTORS, MESSAGE_BYTES
from slotcar.shm.mapping import map_file
from slotcar.shm.region import CLOSED_OFFSET, WORD, BadRegion, RegionGeometry
from slotcar.v1 import engine_service_pb2, plane_pb2

from slotcar_client.errors import AuditFailed, DeadlineExceeded, Unavailable, from_message

# The region and two doorbells, then the slots file, then the weights if they are in a GPU's memory.
_DESCRIPTORS = {plane_pb2.PLANE_RING: (3,), plane_pb2.PLANE_DIRECT: (4, 5)}
_CLOSED = CLOSED_OFFSET // WORD.size

Memory = TypeVar("Memory")

# Connects a plane of a session that was opened. Raises SlotcarError.
Connect: TypeAlias = Callable[[engine_service_pb2.SessionOpened, plane_pb2.Plane.ValueType], "Connection"]


class Connection:
    """What this process and the sidecar share for one session. One thread at a time uses it.

    `region` is mapped for both sides; `words` is the same memory in words of 64 bits, which are read and written whole:
    struct.pack_into is not for words that the other side reads meanwhile, as it writes zeros first. `slots` is the
    slots file, mapped for reading; None on the ring plane. `weights` is the descriptor of a GPU's memory if the slots'
    weights are there; it is closed with the connection. Nothing is sent over `link`, which tells who lives.
    """

    def __init__(
        self, link: socket.socket, descriptors: Sequence[int], region: mmap.mmap, slots: memoryview | None
    ) -> None:
        """Takes the hand-shake socket and the descriptors that came over it, to close them. Raises BadRegion."""
        self.geometry, self.epoch = _read(region)
        self.region = region
        self.words = memoryview(region).cast("Q")
        self.slots = slots
        self.link = link
        self.ended = False
        _, self._sidecar_doorbell, doorbell, *of_slots = descriptors
        self.weights = of_slots[1] if len(of_slots) > 1 else None
        self._doorbell_rang = [(doorbell, select.EPOLLIN)]
        self._link_events = select.poll()
        self._link_events.register(link, select.POLLIN)
        self._events = select.epoll()
        # Edge-triggered: each ring is seen once, without a system call that takes it back.
        self._events.register(doorbell, select.EPOLLIN | select.EPOLLET)
        self._events.register(link, select.EPOLLIN)
        self._finalizer = weakref.finalize(self, _end, os.getpid(), link, self._events, tuple(descriptors))

    def ring(self) -> None:
        """Wakes the sidecar. Raises Unavailable after `close`."""
        try:
            os.eventfd_write(self._sidecar_doorbell, 1)
        except OSError as error:
            raise Unavailable(f"the connection to the sidecar is closed: {error.strerror}") from error

    def wait(self, seconds: float) -> bool:
        """Returns when the sidecar rang or is gone, which `ended` then says; False when `seconds` passed without.

        A ring may be an old one. What the sidecar wrote before it rang can be read afterwards.
        """
        try:
            events = self._events.poll(seconds)
        except (OSError, ValueError):  # a signal handler closed it
            self.ended = True
            return True
        if events != self._doorbell_rang:
            self.ended = self.ended or any(event[0] != self._doorbell_rang[0][0] for event in events)
            return bool(events)
        self.ended = self.ended or bool(self.words[_CLOSED])
        return True

    def is_alive(self) -> bool:
        """Whether the other side is there and has not ended the connection."""
        if not self.ended:
            self.ended = bool(self.words[_CLOSED]) or bool(self._link_events.poll(0))
        return not self.ended

    def close(self) -> None:
        """Ends the connection; the sidecar sees it at once. Idempotent."""
        self.ended = True
        self._sidecar_doorbell = -1
        self._finalizer()


def _end(process: int, link: socket.socket, events: select.epoll, descriptors: tuple[int, ...]) -> None:
    if os.getpid() == process:  # a child of it has descriptors of its own, and the connection goes on for the parent
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
    link.close()
    events.close()
    for descriptor in descriptors:
        os.close(descriptor)


def connect(path: str, hello: plane_pb2.PlaneHello, epoch: str, timeout_seconds: float) -> Connection:
    """The plane that `hello` asks for, from the sidecar at the hand-shake socket `path`, in its life `epoch`.

    Raises Unavailable when none listens, DeadlineExceeded when it does not answer, what it answers instead of a
    welcome, or AuditFailed when its welcome is not what was agreed.
    """
    with _translated(path, timeout_seconds), contextlib.ExitStack() as on_failure:
        link = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        link.settimeout(timeout_seconds)
        link.connect(path)
        link.send(hello.SerializeToString())
        data, descriptors = _receive(link)
        for descriptor in descriptors:
            on_failure.callback(os.close, descriptor)
        opened = _opened(data)
        if len(descriptors) not in _DESCRIPTORS[hello.plane]:
            _audit("the number of descriptors", len(descriptors), _DESCRIPTORS[hello.plane][0])
        region = _mapped("the region", descriptors[0], opened.region_bytes, mmap.mmap)
        on_failure.callback(_unmap, region)
        slots = None
        if hello.plane == plane_pb2.PLANE_DIRECT:
            slots = _mapped("the slots file", descriptors[3], opened.slots_bytes, partial(map_file, writable=False))
        _audit("the region's epoch", _read(region)[1], epoch)
        connection = Connection(link, descriptors, region, slots)
        on_failure.pop_all()
    return connection


@contextlib.contextmanager
def _translated(path: str, timeout_seconds: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"no welcome at {path} within {timeout_seconds:g} s", path=path) from error
    except OSError as error:
        raise Unavailable(f"no hand-shake at {path}: {error.strerror or error}", path=path) from error
    except BadRegion as error:
        raise AuditFailed(str(error), path=path) from error


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """The sidecar's message and the descriptors that came with it; raises AuditFailed unless both are whole."""
    numbers = array("i")
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * numbers.itemsize)
    data, ancillary, flags, _ = link.recvmsg(MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in numbers:
            os.close(descriptor)
        raise AuditFailed(
            f"the welcome has more than {MESSAGE_BYTES} bytes or {MAX_DESCRIPTORS} descriptors", found="more"
        )
    return data, list(numbers)


def _opened(data: bytes) -> plane_pb2.PlaneOpened:
    """What the welcome says is open. Raises the error that it has instead, or AuditFailed."""
    if not data:
        raise Unavailable("the sidecar ended the hand-shake without an answer")
    try:
        welcome = plane_pb2.PlaneWelcome.FromString(data)
    except DecodeError as error:
        raise AuditFailed(f"the welcome of {len(data)} bytes is no PlaneWelcome", found=data[:64]) from error
    if welcome.WhichOneof("result") == "error":
        raise from_message(welcome.error)
    _audit("the welcome's result", welcome.WhichOneof("result"), "opened")
    return welcome.opened


def _mapped(what: str, descriptor: int, size: int, mapped: Callable[[int, int], Memory]) -> Memory:
    """What `mapped` makes of a descriptor. Raises AuditFailed unless it has that size for as long as it lives."""
    _audit(f"the size of {what}", os.fstat(descriptor).st_size, size)
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no memory file
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise AuditFailed(f"{what} can be truncated by others", found=seals, wanted="a seal against shrinking")
    try:
        return mapped(descriptor, size)
    except ValueError as error:
        raise AuditFailed(f"{what} of {size} bytes cannot be mapped: {error}", found=size) from error


def _read(region: mmap.mmap) -> tuple[RegionGeometry, str]:
    with memoryview(region) as data:
        return RegionGeometry.read(data)


def _unmap(memory: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # then it goes with the last view of it
        memory.close()


def _audit(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise AuditFailed(f"{what} is {found!r}, wanted {wanted!r}", found=found, wanted=wanted)
