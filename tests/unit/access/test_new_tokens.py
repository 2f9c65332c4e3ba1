"""A client whose token has ended gets another in the middle of whatever it does, and one is enough for its threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from slotcar_client.aio.rpc import AsyncRpc
from slotcar_client.aio.session import AsyncSession
from slotcar_client.credentials import Address
from slotcar_client.options import SessionOptions
from slotcar_client.rpc import Rpc
from slotcar_client.session import Session

from tests.unit.access.guarded import Guarded, entry, guarded

ME = entry("me", uid=f"[{os.geteuid()}]", token_sha256="[]")
SECONDS = 20.0


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path, ME) as server:
        await server.world.load("sql")
        yield server


@pytest.fixture
def mine(server: Guarded) -> Address:
    return Address(f"unix://{str(server.world.path).removesuffix('.shm')}")


async def test_two_that_are_refused_together_get_one_token(server: Guarded, mine: Address) -> None:
    """Another would end the connection of the first, and with it what runs by it already. To see it fail: ask anew."""
    assert mine.given_token == ""
    assert await asyncio.to_thread(mine.identify, "")
    first = mine.given_token
    assert await asyncio.to_thread(mine.identify, "")
    assert (mine.given_token, server.access.tokens) == (first, 1)
    assert await asyncio.to_thread(mine.identify, first)
    assert mine.given_token not in ("", first)
    mine.close()


async def test_a_token_whose_connection_is_gone_is_none(server: Guarded, mine: Address) -> None:
    """Even if it is not the one that was refused."""
    assert await asyncio.to_thread(mine.identify, "")
    server.world.handshakes.close()
    await server.world.settle_owner()
    assert not await asyncio.to_thread(mine.identify, "")
    assert mine.given_token == ""


async def test_a_mapping_that_waits_asks_for_another_token(mine: Address) -> None:
    """To see it fail: begin the call outside of `identified`."""
    rpc = AsyncRpc(mine, SECONDS)
    async with AsyncSession(rpc, SessionOptions(transport="unary")) as session:
        mine.close()
        mapping = await session.set_mapping([("sql", 2)], wait_seconds=SECONDS)
        assert mapping.digests["sql"]
    await rpc.close()


async def test_a_mapping_and_a_stream_of_forwards_ask_for_another_token(mine: Address) -> None:
    """The same in a thread, where the stream of Forwards opens after the token ended."""

    def work() -> float:
        rpc = Rpc(mine, SECONDS)
        with Session(rpc, SessionOptions(transport="stream")) as session:
            mine.close()
            session.set_mapping([("sql", 2)], wait_seconds=SECONDS)
            mine.close()
            outputs = session.forward({"q": torch.ones(2, 32)})
        rpc.close()
        return float(outputs["q"].abs().sum())

    assert await asyncio.to_thread(work) > 0
