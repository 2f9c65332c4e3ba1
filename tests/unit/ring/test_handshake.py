"""The hand-shake: who gets shared memory, and what everybody else is told."""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from slotcar.shm import region, slots
from slotcar.shm.handshake import MESSAGE_BYTES
from slotcar.shm.region import Kind
from slotcar.shm.slots import LeafShape, SlotsGeometry
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.session import Session
from slotcar_sidecar.ring import handshake
from slotcar_sidecar.ring.peers import check_peer, peer_of

from tests.unit.ring.raw import ARENA_BYTES, RawClient, Refused, hello
from tests.unit.ring.world import EPOCH, MODEL, RANK, World, one_row_each


async def refusal(world: World, message: bytes) -> tuple[str, str]:
    """The reason, and the field at fault; the connection is over then."""
    client = RawClient(world.path, message)
    try:
        await world.settle()
        with pytest.raises(Refused) as refused:
            client.welcome(1.0)
        assert client.is_gone
        assert not client.descriptors
    finally:
        client.close()
    assert world.calls[-1] == ("PlaneHello", refused.value.reason)
    return refused.value.reason, refused.value.error.metadata.get("field", "")


# What is opened


async def test_a_ring_has_a_region(world: World) -> None:
    session = world.session()
    client = await world.connect(session)
    assert len(client.descriptors) == 3
    assert client.opened.slots_bytes == 0
    assert client.epoch == EPOCH
    assert client.geometry == region.RegionGeometry(ARENA_BYTES)
    assert not client.is_closed
    assert session.planes == {0: "ring"}
    assert world.calls == [("PlaneHello", "OK")]


async def test_direct_has_the_slots_too(world: World) -> None:
    session = world.session(ranks=3)
    client = await world.connect(session, "direct", rank=2)
    geometry = SlotsGeometry(3, RANK, "float32", [LeafShape(s.in_features, s.out_features) for s in MODEL.sites])
    assert client.opened.slots_bytes == geometry.total_bytes
    data = os.pread(client.descriptors[3], geometry.total_bytes, 0)
    geometry.check(memoryview(data), EPOCH)
    (generation,) = slots.WORD.unpack_from(data, slots.GENERATION_OFFSET)
    assert generation == world.cache.layout.generation
    assert session.planes == {2: "direct"}


async def test_the_socket_is_for_its_owner_and_group(world: World) -> None:
    assert stat.S_IMODE(world.path.stat().st_mode) == 0o660


# What is refused


def with_session(session: Session, **fields: Any) -> bytes:
    return hello(session.session_id, **fields)


REFUSALS: dict[str, tuple[Callable[[Session], bytes], tuple[str, str]]] = {
    "no message": (lambda _: b"\xff" * 20, ("REQUEST_INVALID", "hello")),
    "too long": (lambda s: with_session(s) + b"\0" * MESSAGE_BYTES, ("REQUEST_INVALID", "hello")),
    "a session that is none": (lambda _: hello("nobody"), ("SESSION_NOT_FOUND", "")),
    "no session": (lambda _: hello(""), ("SESSION_NOT_FOUND", "")),
    "a rank that is none": (lambda s: with_session(s, rank=1), ("REQUEST_INVALID", "rank")),
    "the stream": (lambda s: hello(s.session_id, "ring", plane=1), ("REQUEST_INVALID", "plane")),
    "no plane": (lambda s: hello(s.session_id, "ring", plane=0), ("REQUEST_INVALID", "plane")),
    "another layout": (lambda s: with_session(s, layout_version=region.VERSION + 1), ("VERSION_MISMATCH", "")),
    "no layout": (lambda s: with_session(s, layout_version=0), ("VERSION_MISMATCH", "")),
    "another version": (lambda s: with_session(s, client_version="1.0.0"), ("VERSION_MISMATCH", "")),
    "a large arena": (lambda s: with_session(s, arena_bytes=(1 << 20) + 1), ("CAPACITY_EXCEEDED", "")),
    "the largest arena": (lambda s: with_session(s, arena_bytes=(1 << 64) - 1), ("CAPACITY_EXCEEDED", "")),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_what_cannot_be_is_refused_with_its_reason(world: World, case: str) -> None:
    session = world.session()
    make, wanted = REFUSALS[case]
    assert await refusal(world, make(session)) == wanted
    assert len(world.rings) == 0
    assert session.planes == {}
    await world.connect(session)


async def test_a_plane_that_is_not_offered(tmp_path: Path) -> None:
    world = World(tmp_path / "s.shm", planes=("ring",))
    world.cache.adopt_model(MODEL)
    assert await refusal(world, hello(world.session().session_id, "direct")) == ("REQUEST_INVALID", "plane")
    await world.close()


async def test_direct_waits_for_the_model(modelless: World) -> None:
    session = modelless.session()
    assert await refusal(modelless, hello(session.session_id, "direct")) == ("MODEL_UNKNOWN", "")
    await modelless.connect(session)
    modelless.cache.adopt_model(MODEL)
    await modelless.connect(session, "direct")


async def test_a_server_that_closes_opens_nothing(world: World) -> None:
    session = world.session()
    world.cache.shut_down()
    await world.connect(session)
    world.cache.close()
    assert await refusal(world, hello(session.session_id)) == ("SHUTTING_DOWN", "")


async def test_the_number_of_connections_is_bounded(world: World) -> None:
    """One that takes another's place is not one more."""
    clients = [await world.connect(world.session()) for _ in range(8)]
    (*_, last) = world.cache.sessions
    assert await refusal(world, hello(world.session().session_id)) == ("CAPACITY_EXCEEDED", "")
    await world.connect(last)
    clients[0].close()
    await world.settle()
    await world.connect(world.session())


async def test_a_newer_connection_takes_the_place_of_the_older(world: World) -> None:
    """Of the same rank only."""
    await world.load("sql")
    session = world.session(ranks=2)
    first, other = await world.connect(session), await world.connect(session, rank=1)
    digest = world.source.weights["sql"].adapter.digest
    generation = await world.map(first, f"sql@{digest}")
    second = await world.connect(session)
    assert first.is_closed
    assert first.is_gone
    assert len(world.rings) == 2
    assert session.planes == {0: "ring", 1: "ring"}
    for client in (second, other):
        await world.call(client, Kind.FORWARD, one_row_each(generation, 1))


async def test_no_memory_is_a_capacity_that_is_exceeded(world: World) -> None:
    """In a process that may not make files of that size. To see it fail: let sealed_memory raise OSError."""
    session = world.session()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert await refusal(world, hello(session.session_id)) == ("CAPACITY_EXCEEDED", "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    await world.connect(session)


def limit_for(more: int) -> int:
    """The limit under which this process can open so many descriptors."""
    used = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    free = (number for number in count() if number not in used)
    return next(islice(free, more, None))


async def test_no_descriptors_are_a_capacity_that_is_exceeded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them is one too many; and one that could not be accepted is, once there are descriptors again."""
    monkeypatch.setattr(handshake, "_PAUSE_SECONDS", 0.0)
    session, limit, outcomes = world.session(), resource.getrlimit(resource.RLIMIT_NOFILE), []
    for more in range(8):
        client = RawClient(world.path, hello(session.session_id))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(more), limit[1]))
        try:
            await world.settle()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        await world.settle()
        try:
            client.welcome(1.0)
            outcomes.append("OK")
        except Refused as refused:
            outcomes.append(refused.reason)
        client.close()
        await world.settle()
        assert len(world.rings) == 0
    assert set(outcomes) == {"OK", "CAPACITY_EXCEEDED"}
    assert outcomes[-1] == "OK"


# Those who say nothing


async def test_one_who_says_nothing_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 0.0)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(world.path))
    await world.settle()
    assert client.recv(1) == b""
    client.close()


async def test_many_who_say_nothing_keep_nobody_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest makes room."""
    monkeypatch.setattr(handshake, "_MOST_PENDING", 3)
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(5)]
    for client in silent:
        client.connect(str(world.path))
        client.setblocking(False)
        await world.settle()
    assert [client.recv(1) for client in silent[:2]] == [b""] * 2
    for client in silent[2:]:
        with pytest.raises(BlockingIOError):
            client.recv(1)
    await world.connect(world.session())
    for client in silent:
        client.close()


async def test_an_empty_message_is_the_end(world: World) -> None:
    client = RawClient(world.path, b"")
    await world.settle()
    with pytest.raises(EOFError):
        client.welcome(1.0)
    client.close()


async def test_one_who_leaves_before_the_welcome_leaves_nothing(world: World) -> None:
    session = world.session()
    RawClient(world.path, hello(session.session_id)).close()
    await world.settle()
    assert len(world.rings) == 0
    assert session.planes == {}


async def test_descriptors_that_a_client_sends_are_not_taken(world: World) -> None:
    """With the hello and after it. The world counts its descriptors at the end."""
    session = world.session()
    client = RawClient(world.path, b"x")
    await world.settle()
    client.close()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(world.path))
    socket.send_fds(connection, [hello(session.session_id)], [0, 1, 2])
    socket.send_fds(connection, [b"more"], [0, 1, 2])
    await world.settle()
    connection.close()
    await world.settle()
    assert len(world.rings) == 0


# Who may


def as_another(user: int, groups: list[int], group: int) -> str:
    """What check_peer says of a process of that user and those groups; the socket's group is `group`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # a name without a file
    listener.listen()
    child = os.fork()
    if child == 0:
        os.setgroups(groups[1:])
        os.setgid(groups[0])
        os.setuid(user)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect(listener.getsockname())
        client.recv(1)
        os._exit(0)
    connection, _ = listener.accept()
    try:
        check_peer(peer_of(connection), group)
    except RequestInvalid as error:
        return error.message
    else:
        return ""
    finally:
        connection.close()
        listener.close()
        os.waitpid(child, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_and_the_sockets_group_may() -> None:
    """To see it fail: look at the peer's own group alone."""
    assert as_another(0, [7], 99) == ""
    assert as_another(1234, [99], 99) == ""
    assert as_another(1234, [7, 8, 99], 99) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_others_may_not() -> None:
    said = as_another(1234, [7, 8], 99)
    assert "user 1234 of groups 7, 8" in said
    assert "group 99" in said
    assert as_another(1234, list(range(1, 600)), 1000), "more groups than can be read"


def test_the_user_of_the_process_may() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    check_peer(peer_of(ours), None)
    ours.close()
    theirs.close()
