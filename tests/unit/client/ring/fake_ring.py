"""The sidecar's side of the ring plane as it is told to be, for faults that a real sidecar does not have."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from slotcar.shm import region, slots
from slotcar.shm.handshake import MESSAGE_BYTES, SUFFIX
from slotcar.v1 import engine_service_pb2 as pb
from slotcar.v1 import model_pb2, plane_pb2
from slotcar_client.transports.connection import Connection
from slotcar_sidecar.core import errors
from slotcar_sidecar.rpc import status

from tests.unit.client.fake_engine import FakeEngine
from tests.waiting import eventually

FEATURES = {"k": (4, 4), "o": (4, 8), "q": (4, 4)}
SPEC = model_pb2.ModelSpec(
    sites=[model_pb2.Site(name=name, in_features=i, out_features=o) for name, (i, o) in sorted(FEATURES.items())]
)
NAMES = sorted(FEATURES)
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RingEngine(FakeEngine):
    """A FakeEngine that knows a model and says that it offers the ring."""

    def __init__(self, **adapters: str) -> None:
        super().__init__(**adapters)
        self.epoch = "0123456789abcdef"
        self.planes = [plane_pb2.PLANE_STREAM, plane_pb2.PLANE_RING]
        self.model_spec: model_pb2.ModelSpec | None = SPEC

    def _opened(self, session: str, ranks: int, reserved_slots: int) -> pb.SessionOpened:
        opened = super()._opened(session, ranks, reserved_slots)
        opened.server.planes.extend(self.planes)
        if self.model_spec is not None:
            opened.model_spec.CopyFrom(self.model_spec)
        return opened

    @staticmethod
    def _send(context: Any, error: errors.SlotcarError) -> None:
        """Without gRPC, a refusal is raised."""
        if context is None:
            raise error
        FakeEngine._send(context, error)


def memory(size: int, seals: int = SEALED) -> int:
    descriptor = os.memfd_create("fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@dataclass
class Offer:
    """A welcome with its descriptors, before it is sent."""

    data: bytes
    descriptors: list[int]


@dataclass
class Reply:
    """An answer before it is written."""

    sequence: int
    fingerprint: int = 0
    status: int = region.Status.OK
    payload: bytes = b""
    payload_bytes: int | None = None


@dataclass
class FakeRing:
    """Listens beside the unix socket of `target`. An output is x, twice where the site is wide, plus the base.

    offer, reply: change what is about to be sent, or raise Silence. The others are called when something has happened:
    a hello came; a request of this kind is about to be read, or its answer was written, or rung for. `answer` is set
    while Forwards are answered.
    """

    target: str
    engine: FakeEngine
    hello: Callable[[plane_pb2.PlaneHello], None] = lambda hello: None
    offer: Callable[[Offer], Offer] = lambda offer: offer
    reply: Callable[[Reply], None] = lambda reply: None
    before: Callable[[int], None] = lambda kind: None
    written: Callable[[int], None] = lambda kind: None
    rung: Callable[[int], None] = lambda kind: None
    hellos: list[plane_pb2.PlaneHello] = field(default_factory=list)
    forwards: list[region.Forward] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    connections: list[Served] = field(default_factory=list)
    error: errors.SlotcarError | None = None

    def __post_init__(self) -> None:
        self.answer = threading.Event()
        self.answer.set()
        self.path = self.target.removeprefix("unix://") + SUFFIX
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                return
            hello = plane_pb2.PlaneHello.FromString(link.recv(MESSAGE_BYTES))
            self.hellos.append(hello)
            self.hello(hello)
            try:
                self._welcome(link, hello)
            except Silence:
                link.shutdown(socket.SHUT_RDWR)

    def _welcome(self, link: socket.socket, hello: plane_pb2.PlaneHello) -> None:
        error = self.error
        if hello.session not in self.engine.sessions:
            error = errors.SessionNotFound()
        if error is not None:
            welcome = plane_pb2.PlaneWelcome(error=status.to_message(error))
            link.send(welcome.SerializeToString())
            link.close()
            return
        served = Served(self, link, hello)
        self.connections.append(served)
        opened = plane_pb2.PlaneOpened(region_bytes=served.geometry.total_bytes)
        served.thread.start()
        offer = self.offer(
            Offer(plane_pb2.PlaneWelcome(opened=opened).SerializeToString(), [served.region, *served.doorbells])
        )
        socket.send_fds(link, [offer.data], offer.descriptors)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        Path(self.path).unlink()
        self.answer.set()
        for served in self.connections:
            served.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def silent(_: object) -> None:
    """A `reply` that writes no answer."""
    raise Silence


@contextlib.contextmanager
def time_is_over_when(happened: Callable[[], object]) -> Iterator[None]:
    """A client that waits for an answer waits until `happened`, and no longer."""

    def wait(connection: Connection, seconds: float) -> bool:
        eventually(happened)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "wait", wait)
        yield


class Silence(Exception):
    """Raised by `offer`: the connection ends without a word. By `reply`: no answer is written."""


class Served:
    """One connection."""

    def __init__(self, ring: FakeRing, link: socket.socket, hello: plane_pb2.PlaneHello) -> None:
        self._ring = ring
        self.link = link
        self.session = hello.session
        self.geometry = region.RegionGeometry(hello.arena_bytes)
        self.region = memory(self.geometry.total_bytes)
        self.doorbells = [os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)]
        self.memory = mmap.mmap(self.region, self.geometry.total_bytes)
        header = self.geometry.header(ring.engine.epoch)
        self.memory[: len(header)] = header
        self.words = memoryview(self.memory).cast("Q")
        self.taken = 0
        self.late: list[tuple[int, Reply]] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def end(self) -> None:
        """Ends the connection from the sidecar's side."""
        self.words[region.CLOSED_OFFSET // 8] = 1
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def ring(self) -> None:
        os.eventfd_write(self.doorbells[1], 1)

    def answer_late(self) -> None:
        """Answers what was left without an answer."""
        while self.late:
            self._write(*self.late.pop(0))
        self.ring()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        poll.register(self.doorbells[0], select.POLLIN)
        while self.link.fileno() not in dict(poll.poll()):
            os.eventfd_read(self.doorbells[0])
            while self.taken < self.words[region.SUBMITTED_OFFSET // 8]:
                (cell,) = region.INDEX.unpack_from(self.memory, self.geometry.submission_offset(self.taken))
                self.taken += 1
                self._take(cell)
        self.link.close()
        for descriptor in (self.region, *self.doorbells):
            os.close(descriptor)
        self.over.set()

    def _take(self, cell: int) -> None:
        sequence, kind, size = region.REQUEST.unpack_from(self.memory, self.geometry.request_offset(cell))
        self._ring.before(kind)
        self._ring.kinds.append(kind)
        start = self.geometry.request_payload_offset(cell)
        payload = bytes(self.memory[start : start + size])
        reply = Reply(sequence)
        try:
            self._compute(kind, payload, reply)
        except errors.SlotcarError as error:
            reply.status, reply.payload = region.Status.ERROR, status.to_message(error).SerializeToString()
        try:
            self._ring.reply(reply)
        except Silence:
            self.late.append((cell, reply))
            return
        self._write(cell, reply)
        self._ring.written(kind)
        self.ring()
        self._ring.rung(kind)

    def _write(self, cell: int, reply: Reply) -> None:
        at = self.geometry.answer_payload_offset(cell)
        self.memory[at : at + len(reply.payload)] = reply.payload
        length = len(reply.payload) if reply.payload_bytes is None else reply.payload_bytes
        at = self.geometry.answer_offset(cell)
        region.ANSWER.pack_into(self.memory, at + 8, reply.status, length, 7, reply.fingerprint, 1, 2)
        self.words[at // 8] = reply.sequence

    def _compute(self, kind: int, payload: bytes, reply: Reply) -> None:
        if kind == region.Kind.FORWARD:
            self._forward(payload, reply)
            return
        name, request_type = {
            region.Kind.SET_MAPPING: ("SetMapping", pb.SetMappingRequest),
            region.Kind.RELEASE_MAPPING: ("ReleaseMapping", pb.ReleaseMappingRequest),
            region.Kind.FENCE: ("Fence", pb.FenceRequest),
        }[region.Kind(kind)]
        reply.payload = getattr(self._ring.engine, name)(request_type.FromString(payload), None).SerializeToString()

    def _forward(self, payload: bytes, reply: Reply) -> None:
        ring, engine = self._ring, self._ring.engine
        request = region.Forward.unpack(payload)
        ring.payloads.append(payload)
        ring.forwards.append(request)
        ring.answer.wait(20)
        error = engine.script.pop(0) if engine.script else None
        if error is not None:
            raise error
        if self.session not in engine.sessions:
            raise errors.SessionNotFound
        if request.mapping_id not in engine.sessions[self.session]:
            raise errors.MappingNotFound(request.mapping_id)
        generation, digests = engine.sessions[self.session][request.mapping_id]
        if generation != request.generation:
            raise errors.LayoutStale("moved on", entries=("all",))
        for item in request.items:
            self._item(request, item)
        reply.fingerprint = region.fingerprint(digests)

    def _item(self, request: region.Forward, item: region.Item) -> None:
        features = FEATURES[NAMES[item.site]]
        rows, dtype = sum(request.row_counts), getattr(torch, slots.DTYPES[request.dtype])

        def tensor(offset: int, width: int) -> torch.Tensor:
            if not rows:
                return torch.empty(0, width, dtype=dtype)
            at = self.geometry.arena_offset + offset
            return torch.frombuffer(self.memory, dtype=dtype, count=rows * width, offset=at).view(rows, width)

        x = tensor(item.x_offset, features[0])
        output = torch.cat([x, x], 1)[:, : features[1]]
        if item.base_offset != region.ABSENT:
            output = output + tensor(item.base_offset, features[1])
        tensor(item.out_offset, features[1]).copy_(output)
