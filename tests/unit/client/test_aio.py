"""The asyncio face: the same answers from the same server, and what only a face with tasks can get wrong."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slotcar_client
import torch
from slotcar_client import BASE, Client, Mapping, Session, SlotcarError, aio
from slotcar_client.effects import Effect, Wait
from slotcar_sidecar.core import errors as server_errors

from tests import waiting
from tests.unit.client.fake_adapters import CAPACITY, FakeAdapters
from tests.unit.client.fake_engine import A, B, FakeEngine, FakeServer

X = torch.arange(12.0).reshape(3, 4)
STALE = server_errors.LayoutStale("stale", entries=("sql",))
PATIENCE_SECONDS = 20


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(sql=A, chat=B)


@pytest.fixture
def adapters() -> FakeAdapters:
    return FakeAdapters()


@pytest.fixture
def server(tmp_path: Path, engine: FakeEngine, adapters: FakeAdapters) -> Iterator[FakeServer]:
    with FakeServer(tmp_path, engine, adapters) as server:
        yield server


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[aio.AsyncClient]:
    async with aio.connect(server.target, timeout_seconds=PATIENCE_SECONDS) as client:
        yield client


@pytest.fixture
async def session(client: aio.AsyncClient) -> AsyncIterator[aio.AsyncSession]:
    async with client.session("test") as session:
        yield session


async def eventually(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(waiting.eventually, condition)


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_it_has_the_methods_of_the_other_face_with_their_parameters() -> None:
    sync_only = {"rows", "follow_rows", "unfollow_rows", "sites_of", "sites_needing_base", "ranks", "reserved_slots"}
    sync_only |= {"transport", "transport_reason", "forward_async"}
    own = {name for kind in Session.__mro__[:-1] for name in public(kind)}
    assert public(aio.AsyncSession) == own - sync_only
    assert public(aio.AsyncClient) == public(Client) - {"join"}
    for asynchronous, other in ((aio.AsyncClient, Client), (aio.AsyncSession, Session)):
        for name in public(asynchronous):
            if inspect.isfunction(found := inspect.getattr_static(asynchronous, name)):
                assert list(inspect.signature(found).parameters) == list(
                    inspect.signature(getattr(other, name)).parameters
                )


async def test_forward_answers_for_the_mapping(session: aio.AsyncSession, engine: FakeEngine) -> None:
    mapping = await session.set_mapping([("sql", 2), (BASE, 1)])
    assert (mapping.digests, session.mapping) == ({"sql": A}, mapping)
    out = await session.forward({"q": X}, base={"q": X + 5})
    assert torch.equal(out["q"], X + 5)
    assert session.layout.version.epoch == "e1"
    await session.fence()
    await session.release_mapping()
    with pytest.raises(slotcar_client.MappingNotFound):
        await session.forward({"q": X})


async def test_recovery_is_by_digest(session: aio.AsyncSession, engine: FakeEngine) -> None:
    await session.set_mapping([("sql", 3)])
    engine.script = [STALE]
    await session.forward({"q": X})
    engine.sessions.clear()
    await session.forward({"q": X})
    refs = [[entry.ref for entry in request.targets] for request in engine.named("SetMapping")]
    assert refs == [["sql"], [f"sql@{A}"], [f"sql@{A}"]]
    assert session.recoveries == {"LAYOUT_STALE": 1, "SESSION_NOT_FOUND": 1}
    engine.adapters["sql"] = B
    engine.script = [STALE]
    with pytest.raises(slotcar_client.AdapterNotFound):
        await session.forward({"q": X})


async def test_on_stale_may_refuse_and_the_session_goes_on(client: aio.AsyncClient, engine: FakeEngine) -> None:
    told: list[Mapping] = []

    def on_stale(mapping: Mapping, _error: SlotcarError) -> None:
        told.append(mapping)
        if len(told) == 1:
            raise RuntimeError("repeat the step")

    async with client.session(on_stale=on_stale) as session:
        await session.set_mapping([("sql", 3)])
        engine.script = [STALE, STALE]
        with pytest.raises(RuntimeError, match="repeat the step"):
            await session.forward({"q": X})
        await session.forward({"q": X})
        assert session.recoveries == {"LAYOUT_STALE": 1}


async def test_holds_end_with_their_block(session: aio.AsyncSession, engine: FakeEngine) -> None:
    async with await session.hold("sql", hold_id=3) as hold:
        assert (hold.ref, hold.tier) == (f"sql@{A}", "host")
        assert engine.holds[session.session_id] == {3: A}
    assert engine.holds[session.session_id] == {}
    async with await session.load_held("sql", "/a"):
        engine.sessions.clear()


async def test_a_broken_stream_is_resumed(session: aio.AsyncSession, engine: FakeEngine) -> None:
    before = session.session_id
    engine.streams[-1].set()
    await eventually(lambda: session.recoveries.get("STREAM_ENDED"))
    assert session.session_id == before
    assert engine.named("OpenSession")[-1].resume_session == before


async def test_the_answer_to_a_cancelled_call_is_nobodys(session: aio.AsyncSession, engine: FakeEngine) -> None:
    await session.set_mapping([("sql", 3)])
    engine.answer.clear()
    task = asyncio.create_task(session.forward({"q": X}))
    await eventually(lambda: engine.named("Forward"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.answer.set()
    for value in range(5):
        assert torch.equal((await session.forward({"q": X + value}))["q"], X + value)


async def test_tasks_share_a_session(session: aio.AsyncSession) -> None:
    await session.set_mapping([("sql", 3)])
    outs = await asyncio.gather(*(session.forward({"q": X + value}) for value in range(20)))
    for value, out in enumerate(outs):
        assert torch.equal(out["q"], X + value)


async def test_others_go_on_while_a_call_is_queued_and_close_ends_it(
    session: aio.AsyncSession, engine: FakeEngine
) -> None:
    old = await session.set_mapping([("sql", 3)])
    engine.slots.clear()
    task = asyncio.create_task(session.set_mapping([("chat", 3)], wait_seconds=3600.0))
    await eventually(engine.queued.is_set)
    await session.forward({"q": X}, mapping=old)
    await session.close()
    with pytest.raises(slotcar_client.SessionClosed):
        await task
    engine.slots.set()


async def test_a_cancelled_queue_leaves_the_session_usable(session: aio.AsyncSession, engine: FakeEngine) -> None:
    engine.slots.clear()
    task = asyncio.create_task(session.set_mapping([("chat", 3)], wait_seconds=3600.0))
    await eventually(engine.queued.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.slots.set()
    await session.set_mapping([("sql", 3)])
    await session.forward({"q": X})


async def test_close_ends_a_call_that_waits_for_the_server(
    client: aio.AsyncClient, server: FakeServer, engine: FakeEngine
) -> None:
    session = client.session(away="wait", away_seconds=3600.0)
    await session.__aenter__()
    await session.set_mapping([("sql", 3)])
    waits = asyncio.Event()
    perform = session._perform

    async def seen(effect: Effect) -> Any:
        if isinstance(effect, Wait) and asyncio.current_task() is task:
            waits.set()
        return await perform(effect)

    await asyncio.to_thread(server.stop)
    session._perform = seen  # type: ignore[method-assign]
    task = asyncio.create_task(session.forward({"q": X}))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await waits.wait()
    await session.close()
    with pytest.raises(slotcar_client.SessionClosed):
        await task
    server.start()


async def test_a_call_that_waits_goes_on_when_the_server_is_back(
    client: aio.AsyncClient, server: FakeServer, engine: FakeEngine
) -> None:
    async with client.session(away="wait", away_seconds=3600.0) as session:
        await session.set_mapping([("sql", 3)])
        await asyncio.to_thread(server.stop)
        engine.sessions.clear()
        perform = session._perform

        async def back_on_wait(effect: Effect) -> Any:
            if isinstance(effect, Wait):
                session._perform = perform  # type: ignore[method-assign]
                server.start()
            return await perform(effect)

        session._perform = back_on_wait  # type: ignore[method-assign]
        assert torch.equal((await session.forward({"q": X}))["q"], X)
        assert [entry.ref for entry in engine.named("SetMapping")[-1].targets] == [f"sql@{A}"]


async def test_without_a_server_calls_fail_at_once(tmp_path: Path) -> None:
    async with aio.connect(f"unix://{tmp_path}/none.sock") as client:
        calls: list[Callable[[], Awaitable[object]]] = [
            client.list,
            client.session().__aenter__,
            client.events().__aenter__,
        ]
        for call in calls:
            with pytest.raises(slotcar_client.Unavailable):
                await call()


@pytest.mark.parametrize("version", ["0.9.0", "1.0.0", "garbage"])
async def test_other_versions_are_refused(client: aio.AsyncClient, engine: FakeEngine, version: str) -> None:
    engine.version = version
    with pytest.raises(slotcar_client.VersionMismatch):
        await client.session().__aenter__()
    assert engine.sessions == {}


async def test_operators_verbs(client: aio.AsyncClient, adapters: FakeAdapters, tmp_path: Path) -> None:
    assert [session.session for session in await client.sessions()] == ["a" * 8, "b" * 8, "c" * 8]
    assert await client.end_session("a" * 8)
    assert (await client.capacity()).slots == CAPACITY["slots"]
    assert (await client.load("sql", "/a", tier="host")).digest == A
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(3 << 20))
    assert (await client.upload("sql", tmp_path)).bytes == 3 << 20
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(slotcar_client.RequestInvalid):
        await client.upload("sql", tmp_path)


async def test_events_come_until_they_are_closed(client: aio.AsyncClient) -> None:
    async with client.events() as events:
        assert events.since.generation == 5
        kinds = []
        async for event in events:
            kinds.append(event.kind)
            if event.kind == "expired":
                asyncio.get_running_loop().call_soon(events.close)
        assert kinds == ["held", "hold_released", "expired"]


async def test_close_ends_everything(client: aio.AsyncClient, engine: FakeEngine) -> None:
    session = client.session()
    await session.__aenter__()
    await client.close()
    await client.close()
    assert engine.sessions == {}
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "slotcar-session"]
    with pytest.raises(slotcar_client.SessionClosed):
        await session.forward({"q": X})
    with pytest.raises(slotcar_client.ClientClosed):
        await client.list()
