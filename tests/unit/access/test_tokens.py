"""The hand-shake knows processes by their user, and what it gives them is good as long as they are there."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from slotcar.shm import region
from slotcar.v1 import adapter_service_pb2 as adapters
from slotcar.v1 import engine_service_pb2 as engines
from slotcar.v1 import plane_pb2
from slotcar_client.credentials import Address
from slotcar_client.errors import NotAllowed, Unauthenticated, from_message

from tests.unit.access.guarded import Guarded, entry, guarded, policy

ME = entry("me", uid=f"[{os.geteuid()}]", token_sha256="[]", planes="[stream, ring]")
CAPACITY = adapters.GetCapacityRequest()


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path, ME, entry("other")) as server:
        yield server


def address(server: Guarded) -> Address:
    return Address(f"unix://{str(server.world.path).removesuffix('.shm')}")


async def welcome(server: Guarded, **hello: object) -> plane_pb2.PlaneWelcome:
    """What the sidecar answers to one hello."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setblocking(False)
        await loop.sock_connect(link, str(server.world.path))
        await loop.sock_sendall(link, plane_pb2.PlaneHello(**hello).SerializeToString())
        return plane_pb2.PlaneWelcome.FromString(await loop.sock_recv(link, 1 << 14))


async def call_with(server: Guarded, shown: Address, channel: aio.Channel | None = None) -> bool:
    """Whether a call with what the address shows is let in."""
    try:
        await server.method("GetCapacity", channel)(CAPACITY, metadata=shown.metadata(), timeout=20)
    except aio.AioRpcError:
        return False
    return True


async def test_a_token_lives_as_long_as_its_connection(server: Guarded) -> None:
    """To see it fail: forget nothing when the connection ends."""
    mine = address(server)
    assert not await call_with(server, mine)
    assert await asyncio.to_thread(mine.identify)
    shown = mine.metadata()
    assert await call_with(server, mine)
    mine.close()
    await server.world.settle_owner()
    assert not server.access.tokens
    with pytest.raises(aio.AioRpcError, match="token"):
        await server.method("GetCapacity")(CAPACITY, metadata=shown, timeout=20)


async def test_a_token_of_the_socket_is_of_no_use_over_tcp(server: Guarded) -> None:
    mine = address(server)
    assert await asyncio.to_thread(mine.identify)
    assert not await call_with(server, mine, server.tcp)
    assert await call_with(server, mine)
    mine.close()


async def test_a_user_whom_the_policy_does_not_know_gets_none(server: Guarded) -> None:
    server.access.replace(policy(entry("other")))
    with pytest.raises(Unauthenticated, match=f"user {os.geteuid()}"):
        await asyncio.to_thread(address(server).identify)
    assert server.told[-1]["peer"] == server.told[-1]["found"]


async def test_a_token_ends_with_its_client(server: Guarded) -> None:
    """Its connection too, so that the client knows that it needs another."""
    mine = address(server)
    assert await asyncio.to_thread(mine.identify)
    server.access.replace(policy(entry("other")))
    assert not server.access.tokens
    assert mine.metadata() is None
    server.access.replace(policy(ME))
    assert await asyncio.to_thread(mine.identify)
    assert await call_with(server, mine)
    mine.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_gets_none_and_can_use_no_token_afterwards(server: Guarded) -> None:
    """What it may have read in our memory is worth nothing once our connection has ended."""
    mine = address(server)
    assert await asyncio.to_thread(mine.identify)
    server.world.path.chmod(0o777)
    for folder in server.world.path.parents:
        if folder.is_relative_to(tempfile.gettempdir()) and folder != Path(tempfile.gettempdir()):
            folder.chmod(0o755)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(1234)
        os.setuid(1234)
        try:
            address(server).identify()
        except Unauthenticated as error:
            os.write(write, error.message.encode())
        finally:
            os._exit(0)
    os.close(write)
    said = await asyncio.to_thread(os.read, read, 1000)
    os.close(read)
    await asyncio.to_thread(os.waitpid, child, 0)
    assert b"user 1234" in said
    mine.close()


async def test_a_client_has_so_many_tokens_and_no_more(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotcar_sidecar.rpc.access.MAX_TOKENS_OF_A_CLIENT", 2)
    mine = [address(server) for _ in range(3)]
    assert await asyncio.to_thread(mine[0].identify)
    assert await asyncio.to_thread(mine[1].identify)
    refused = await welcome(server, wants_token=True)
    assert refused.error.code == 8
    for each in mine:
        each.close()


@pytest.mark.parametrize(
    ("plane", "owner", "kind"),
    [("PLANE_RING", "me", None), ("PLANE_DIRECT", "me", NotAllowed), ("PLANE_RING", "other", NotAllowed)],
)
async def test_a_plane_is_for_the_client_that_has_it_and_its_own_session(
    server: Guarded, plane: str, owner: str, kind: type[Exception] | None
) -> None:
    """Direct shows every adapter's weights; and an id that leaked opens no ring."""
    mine = address(server)
    assert await asyncio.to_thread(mine.identify)
    shown = mine.metadata() if owner == "me" else (("authorization", "Bearer the-token-of-other"),)
    call = server.method("OpenSession")(engines.OpenSessionRequest(), metadata=shown)
    opened = (await call.read()).opened
    asked = {"session": opened.session, "plane": plane, "arena_bytes": 4096, "layout_version": region.VERSION}
    answer = await welcome(server, **asked)
    if kind is None:
        assert answer.WhichOneof("result") == "opened"
    else:
        assert isinstance(from_message(answer.error), kind)
    call.cancel()
    mine.close()


async def test_a_stream_ends_with_its_token(server: Guarded) -> None:
    """So a copy of a token is of no more use than its connection. To see it fail: look at it at the first call."""
    mine = address(server)
    assert await asyncio.to_thread(mine.identify)
    call = server.method("OpenSession")(engines.OpenSessionRequest(), metadata=mine.metadata())
    await call.read()
    mine.close()
    assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_process_that_is_another_client_now_has_no_ring(server: Guarded) -> None:
    """Somebody puts an entry for the user before that of the group. To see it fail: look at the client's alone."""
    group = entry("me", gid=f"[{os.getegid()}]", token_sha256="[]", planes="[stream, ring]")
    server.access.replace(policy(group))
    mine = address(server)
    assert await asyncio.to_thread(mine.identify)
    call = server.method("OpenSession")(engines.OpenSessionRequest(grace={"seconds": 60}), metadata=mine.metadata())
    opened = (await call.read()).opened
    hello = plane_pb2.PlaneHello(
        session=opened.session, plane=plane_pb2.PLANE_RING, arena_bytes=4096, layout_version=region.VERSION
    )
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setblocking(False)
        await loop.sock_connect(link, str(server.world.path))
        await loop.sock_sendall(link, hello.SerializeToString())
        assert plane_pb2.PlaneWelcome.FromString(await loop.sock_recv(link, 1 << 14)).HasField("opened")
        barred = entry("barred", uid=f"[{os.geteuid()}]", token_sha256="[]", verbs="[]")
        server.access.replace(policy(barred, group))
        assert await loop.sock_recv(link, 1) == b""
    assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
    assert not server.access.tokens
