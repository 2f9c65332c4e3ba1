"""What the hand-shake may bring, and that nothing of a refused one is left."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import slotcar_client
import torch
from slotcar.shm import region
from slotcar.shm.handshake import MESSAGE_BYTES
from slotcar.v1 import plane_pb2
from slotcar_client import Client, Session
from slotcar_sidecar.core import errors as server_errors

from tests.unit.client.fake_engine import A, FakeServer
from tests.unit.client.ring.fake_ring import SEALED, FakeRing, Offer, RingEngine, Silence, memory

X = torch.arange(12.0).reshape(3, 4)
EPOCH = "0123456789abcdef"
GEOMETRY = region.RegionGeometry(1 << 16)
HEADER = GEOMETRY.header(EPOCH)


def region_file(header: bytes = HEADER, *, size: int = GEOMETRY.total_bytes, seals: int = SEALED) -> int:
    descriptor = memory(size, 0)
    os.pwrite(descriptor, header[:size], 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def with_region(descriptor: Callable[[], int], size: int = GEOMETRY.total_bytes) -> Callable[[Offer], Offer]:
    def change(offer: Offer) -> Offer:
        opened = plane_pb2.PlaneOpened(region_bytes=size)
        data = plane_pb2.PlaneWelcome(opened=opened).SerializeToString()
        return Offer(data, [descriptor(), *offer.descriptors[1:]])

    return change


def spoilt(offset: int, data: bytes) -> Callable[[Offer], Offer]:
    """The header with other bytes at one place."""
    header = bytearray(HEADER)
    header[offset : offset + len(data)] = data
    return with_region(lambda: region_file(bytes(header)))


def plain_file() -> int:
    descriptor = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(descriptor, GEOMETRY.total_bytes)
    os.pwrite(descriptor, HEADER, 0)
    return descriptor


AUDITED: dict[str, Callable[[Offer], Offer]] = {
    "no message": lambda offer: Offer(b"\xff\xff\xff", offer.descriptors),
    "an empty welcome": lambda offer: Offer(plane_pb2.PlaneWelcome(opened=None).SerializeToString() or b"\x18\x01", []),
    "more than a message": lambda offer: Offer(bytes(MESSAGE_BYTES + 1), offer.descriptors),
    "no descriptor": lambda offer: Offer(offer.data, []),
    "two descriptors": lambda offer: Offer(offer.data, offer.descriptors[:2]),
    "four descriptors": lambda offer: Offer(offer.data, [*offer.descriptors, offer.descriptors[0]]),
    "five descriptors": lambda offer: Offer(offer.data, [*offer.descriptors, *offer.descriptors[:2]]),
    "a region of another size": with_region(region_file, GEOMETRY.total_bytes - 4096),
    "an empty region": with_region(lambda: region_file(size=0), 0),
    "a region of a page": with_region(lambda: region_file(size=4096), 4096),
    "a region of some bytes": with_region(lambda: region_file(size=20), 20),
    "a region that can be truncated": with_region(lambda: region_file(seals=0)),
    "a region that can only not grow": with_region(lambda: region_file(seals=fcntl.F_SEAL_GROW)),
    "a region that is a file": with_region(plain_file),
    "another magic": spoilt(0, b"SLOTCARX"),
    "another version": spoilt(8, b"\x09"),
    "no cells": spoilt(12, bytes(4)),
    "many cells": spoilt(12, b"\xff\xff\xff\xff"),
    "other payloads": spoilt(16, b"\x01\x00\x01"),
    "no payloads": spoilt(16, bytes(4)),
    "another arena": spoilt(24, b"\x00\x00\x00\x00\x00\x01"),
    "a larger arena": spoilt(32, b"\xff\xff\xff\xff\xff\xff\xff\xff"),
    "another epoch": spoilt(40, b"fedcba"),
    "an epoch that is none": spoilt(40, b"\xff\xfe"),
}


def shared() -> list[str]:
    """Memory files of the sidecar that this process has open or mapped."""
    gc.collect()  # the sidecars of earlier tests
    links = Path("/proc/self/fd").iterdir()
    names = [str(link.readlink()) for link in links if link.is_symlink()]
    names += [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    return sorted(name for name in names if "memfd:fake" in name)


@pytest.mark.parametrize("kind", AUDITED)
def test_a_welcome_that_is_not_what_was_agreed_is_refused(client: Client, ring: FakeRing, kind: str) -> None:
    kept: list[list[int]] = []

    def offer(before: Offer) -> Offer:
        after = AUDITED[kind](before)
        kept.append(after.descriptors)
        return after

    ring.offer = offer
    with pytest.raises(slotcar_client.AuditFailed):
        client.session(transport="ring", arena_bytes=GEOMETRY.arena_bytes)
    assert ring.connections[0].over.wait(20), "the client ended the connection"
    for descriptor in set(kept[0]) - {ring.connections[0].region, *ring.connections[0].doorbells}:
        os.close(descriptor)
    ring.connections.pop().thread.join(20)
    assert shared() == []


def test_a_hand_shake_that_ends_without_a_word_is_unavailable(client: Client, ring: FakeRing) -> None:
    def silent(offer: Offer) -> Offer:
        raise Silence

    ring.offer = silent
    with pytest.raises(slotcar_client.Unavailable):
        client.session(transport="ring")


def test_an_error_of_the_sidecar_is_raised(client: Client, ring: FakeRing, engine: RingEngine) -> None:
    ring.error = server_errors.CapacityExceeded("no room", found=2, wanted=1)
    with pytest.raises(slotcar_client.CapacityExceeded, match="no room") as caught:
        client.session(transport="ring")
    assert caught.value.metadata == {"found": "2", "wanted": "1"}
    assert engine.sessions == {}, "the session was closed"


def test_without_a_socket_the_ring_is_unavailable(tmp_path: Path, engine: RingEngine) -> None:
    with FakeServer(tmp_path, engine) as server, slotcar_client.connect(server.target) as client:
        path = f"{tmp_path}/f.sock.shm"
        with pytest.raises(slotcar_client.Unavailable) as caught:
            client.session(transport="ring")
        assert caught.value.metadata["path"] == path
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(path)
        with pytest.raises(slotcar_client.Unavailable):
            client.session(transport="ring")


def test_a_socket_of_another_kind_is_unavailable(tmp_path: Path, engine: RingEngine) -> None:
    with FakeServer(tmp_path, engine) as server, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/f.sock.shm")
        listener.listen()
        with (
            slotcar_client.connect(server.target) as client,
            pytest.raises(slotcar_client.Unavailable),
        ):
            client.session(transport="ring")


def test_a_sidecar_that_does_not_welcome_is_waited_for_until_the_deadline(tmp_path: Path, engine: RingEngine) -> None:
    with FakeServer(tmp_path, engine) as server, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{tmp_path}/f.sock.shm")
        listener.listen()
        with (
            slotcar_client.connect(server.target, timeout_seconds=0.3) as client,
            pytest.raises(slotcar_client.DeadlineExceeded),
        ):
            client.session(transport="ring")


def test_a_socket_with_no_room_for_another_connection_is_unavailable(tmp_path: Path, engine: RingEngine) -> None:
    with FakeServer(tmp_path, engine) as server, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{tmp_path}/f.sock.shm")
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect(f"{tmp_path}/f.sock.shm")
            with (
                slotcar_client.connect(server.target, timeout_seconds=0.3) as client,
                pytest.raises((slotcar_client.Unavailable, slotcar_client.DeadlineExceeded)),
            ):
                client.session(transport="ring")


def test_the_hello_says_who_asks_for_what(client: Client, ring: FakeRing) -> None:
    with client.session(transport="ring", arena_bytes=1 << 20) as session:
        (hello,) = ring.hellos
        assert hello == plane_pb2.PlaneHello(
            session=session.session_id,
            plane=plane_pb2.PLANE_RING,
            arena_bytes=1 << 20,
            layout_version=region.VERSION,
            client_version=hello.client_version,
        )
        assert hello.client_version


def test_descriptors_do_not_reach_programs_that_are_started(session: Session) -> None:
    assert session.forward({"q": X})
    connection = session._choice.transport._line.cells.connection  # type: ignore[attr-defined]
    numbers = [connection.link.fileno(), connection._sidecar_doorbell, connection._doorbell_rang[0][0]]
    assert not any(os.get_inheritable(number) for number in numbers)


def test_memory_stays_mapped_for_as_long_as_it_is_used(client: Client, ring: FakeRing) -> None:
    session = client.session(transport="ring")
    session.set_mapping([(f"sql@{A}", 3)])
    session.forward({"q": X})
    memory_of = session._choice.transport._line.cells.connection.region  # type: ignore[attr-defined]
    view = torch.frombuffer(memory_of, dtype=torch.uint8)
    session.close()
    assert bytes(view[:8].numpy()) == region.MAGIC
    assert isinstance(memory_of, mmap.mmap)
    del view, memory_of
    assert ring.connections[0].over.wait(20)
    ring.connections.pop().thread.join(20)
    assert shared() == []
