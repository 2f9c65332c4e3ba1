"""How channels end, and what is left of them: nothing."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf import duration_pb2
from slotcar.shm.region import Kind
from slotcar_sidecar.core.ids import AdapterRef
from slotcar_sidecar.core.layout import SlotState

from tests.unit.ring.raw import RawClient, Refused, mapping_request
from tests.unit.ring.world import MODEL, World, one_row_each, open_descriptors

PATIENCE_SECONDS = 30.0


async def served(world: World) -> tuple[RawClient, int]:
    """A client and the generation of its mapping."""
    await world.load("sql")
    client = await world.connect(world.session())
    return client, await world.map(client, "sql")


async def assert_over(world: World, client: RawClient) -> None:
    assert client.is_closed
    assert client.is_gone
    assert client.rings() > 0
    await world.settle()
    assert len(world.rings) == 0
    world.cache.check_integrity()


# Sessions


async def test_a_channel_ends_with_its_session(world: World) -> None:
    """To see it fail: do not call when_session_ends in AdapterCache.close_session."""
    client, _ = await served(world)
    (session,) = world.cache.sessions
    world.cache.close_session(session.session_id)
    assert client.is_closed
    assert client.is_gone
    await world.settle()
    await assert_over(world, client)
    assert session.planes == {}


async def test_a_channel_ends_with_the_grace_of_its_session(world: World) -> None:
    client, _ = await served(world)
    (session,) = world.cache.sessions
    assert session.attachment is not None
    world.cache.detach_session(session, session.attachment)
    world.clock.now += 9
    world.cache.expire()
    await world.settle()
    assert not client.is_closed, "a session in its grace goes on"
    world.clock.now += 2
    world.cache.expire()
    await world.settle()
    await assert_over(world, client)


async def test_an_operator_ends_all_channels_of_a_session(world: World) -> None:
    session = world.session(ranks=3)
    clients = [await world.connect(session, plane, rank=rank) for rank, plane in enumerate(("ring", "direct", "ring"))]
    other = await world.connect(world.session())
    assert world.cache.end_session(session.session_id.short)
    await world.settle()
    assert all(client.is_closed and client.is_gone for client in clients)
    assert not other.is_closed
    assert len(world.rings) == 1


async def test_nothing_is_answered_after_the_end_of_a_channel(world: World) -> None:
    """To see it fail: do not shut the connection in Channel.end."""
    client, generation = await served(world)
    ((channel,), (ring,)) = world.rings._open, world.rings.threads
    channel.end()
    cell = client.send(Kind.FORWARD, one_row_each(generation, 1))
    await world.settle()
    assert client.read(cell).sequence != client.submitted
    assert world.observer.tallies["ring"].reasons == {}
    ring.drop(channel)


async def test_a_call_that_waits_ends_with_its_channel(world: World) -> None:
    """Its place in the queue goes, and what it replaces has its pins again."""
    await world.load("a", "b", "c", "d")
    holder = await world.connect(world.session())
    await world.map(holder, "b", "c", "d")
    client = await world.connect(world.session())
    client.send(Kind.SET_MAPPING, mapping_request("a", load=True, wait=duration_pb2.Duration(seconds=60)))
    await world.settle()
    assert world.cache.capacity().waiting == 1
    client.close()
    await world.settle()
    assert world.cache.capacity().waiting == 0
    assert len(world.rings) == 1


# Clients


async def test_a_client_that_is_gone_leaves_nothing(world: World) -> None:
    client, _ = await served(world)
    (session,) = world.cache.sessions
    client.close()
    await world.settle()
    assert len(world.rings) == 0
    assert session.planes == {}
    assert world.cache.residency.pins.pinned(), "its session goes on"


async def test_descriptors_do_not_add_up(world: World) -> None:
    """To see it fail: leave a close out of Channel.close, or the unregister out of RingThread._forget."""
    session = world.session()
    client = await world.connect(session)
    before = open_descriptors()
    for _ in range(20):
        newer = await world.connect(session, "direct")
        client.close()
        client = newer
        await world.settle()
    client.close()
    await world.settle()
    assert open_descriptors() < before


async def test_the_server_closes(world: World) -> None:
    client, _ = await served(world)
    world.rings.close()
    assert client.is_closed
    assert client.is_gone
    await world.settle()
    await assert_over(world, client)


# Threads


class Kernel:
    """A kernel that begins and then waits to be let go."""

    def __init__(self) -> None:
        self.begun, self._go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._go.wait(PATIENCE_SECONDS)

    def let_go(self) -> None:
        self._go.set()


@contextmanager
def kernel_under_way(world: World) -> Iterator[Kernel]:
    """The threads of rings take a turn each, in threads, where the next kernel waits for the end of the context."""
    kernel = Kernel()
    world.device.before_kernel = kernel
    threads = [threading.Thread(target=ring.turn, args=(PATIENCE_SECONDS,)) for ring in world.rings.threads]
    for thread in threads:
        thread.start()
    try:
        assert kernel.begun.wait(PATIENCE_SECONDS)
        yield kernel
    finally:
        kernel.let_go()
        for thread in threads:
            thread.join()
        world.device.before_kernel = lambda: None


async def test_a_client_that_dies_while_its_kernel_runs_is_freed_after_it(world: World) -> None:
    """Its session ends meanwhile too. To see it fail: let RingThread.drop close the channel at once."""
    client, generation = await served(world)
    (session,) = world.cache.sessions
    client.send(Kind.FORWARD, one_row_each(generation, 1))
    with kernel_under_way(world):
        assert world.cache.running(session) == 1
        client.close()
        world.cache.close_session(session.session_id)
        assert len(world.rings) == 1
    await world.settle()
    assert len(world.rings) == 0
    assert world.cache.forwards_in_flight == 0
    world.cache.check_integrity()


async def test_a_fence_waits_for_a_kernel_in_a_thread(world: World) -> None:
    """Also one that does not come through a ring."""
    client, generation = await served(world)
    (session,) = world.cache.sessions
    client.send(Kind.FORWARD, one_row_each(generation, 1))
    with kernel_under_way(world):
        fence = asyncio.get_running_loop().create_task(world.cache.fence(session.session_id))
        await world.settle_owner()
        assert not fence.done()
    await world.settle()
    await fence


async def test_a_fill_waits_for_a_kernel_in_a_thread(world: World) -> None:
    """The slot is taken by force while its bytes are read: nothing is written until the kernel ends, and its result,
    which may have been right, is not given.

    To see it fail: let Marks._await not look at threads, or drop the second check in ThreadForwards.execute.
    """
    client, generation = await served(world)
    await world.load("a", "b")
    for name in ("a", "b"):
        world.cache.keep(AdapterRef.parse(name))
    slot = world.cache.layout.find(world.source.weights["sql"].adapter.digest)
    assert slot is not None
    cell = client.send(Kind.FORWARD, one_row_each(generation, 1))
    with kernel_under_way(world):
        world.cache.unload(AdapterRef.parse("sql"), force=True)
        load = asyncio.get_running_loop().create_task(world.load("c"))
        await world.settle_owner()
        assert not load.done()
        assert world.cache.layout[slot].state is SlotState.FILLING
        assert world.device.matches(slot, world.source.weights["sql"])
    await world.settle()
    await load
    assert world.device.matches(slot, world.source.weights["c"])
    with pytest.raises(Refused) as refused:
        client.answer(cell)
    assert refused.value.reason == "LAYOUT_STALE"
    world.cache.check_bytes()


async def test_a_client_that_makes_its_doorbell_block_is_let_go(world: World) -> None:
    """Client and sidecar share what says that writes to the doorbell do not block, so the client can take it away.

    The owner calls the thread back; it ends that channel, wakes its client no more, and serves on.

    To see it fail: let RingThread._ring not take InterruptedError, or do not set is_deaf in Channel.ring.
    """
    client, generation = await served(world)
    other, again = await served(world)
    signal.signal(signal.SIGURG, lambda *_: None)
    flags = fcntl.fcntl(client.descriptors[2], fcntl.F_GETFL)
    fcntl.fcntl(client.descriptors[2], fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    os.eventfd_read(client.descriptors[2])
    os.eventfd_write(client.descriptors[2], (1 << 64) - 2)
    for _ in range(3):
        client.send(Kind.FORWARD, one_row_each(generation, 1))
    (ring,) = world.rings.threads
    thread = threading.Thread(target=ring.turn, args=(PATIENCE_SECONDS,))
    thread.start()
    while not world.called_back:
        world.rings.look()
    ident = thread.ident
    assert ident is not None
    while thread.is_alive():
        signal.pthread_kill(ident, signal.SIGURG)
        thread.join(0.01)
    assert ring.ringing is None
    await world.settle()
    assert client.is_closed
    assert len(world.rings) == 1
    await world.call(other, Kind.FORWARD, one_row_each(again, 1))


async def test_channels_are_spread_over_threads(tmp_path: Path) -> None:
    world = World(tmp_path / "s.shm", threads=2)
    world.cache.adopt_model(MODEL)
    clients = [await world.connect(world.session()) for _ in range(4)]
    assert [len(ring._served) for ring in world.rings.threads] == [2, 2]
    for client in clients[:2]:
        client.close()
        await world.settle()
    for _ in range(2):
        await world.connect(world.session())
    assert [len(ring._served) for ring in world.rings.threads] == [2, 2]
    await world.close()


async def test_a_thread_that_ends_ends_its_channels(world: World) -> None:
    client, _ = await served(world)
    (ring,) = world.rings.threads
    ring.stop()
    ring.run()
    assert client.is_closed
    await world.settle()
    assert client.is_gone
    assert [session.planes for session in world.cache.sessions] == [{}]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what nothing refers to any more goes away."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_refusals_keep_nothing_of_a_channel(world: World) -> None:
    """An error whose traceback leads to a frame that still has the error would, until the collector comes by.

    To see it fail: keep the error in a variable of RingThread._forward.
    """
    await world.load("sql")
    before = open_descriptors()
    client = await world.connect(world.session())
    generation = await world.map(client, "sql")
    await world.call(client, Kind.FORWARD, one_row_each(generation, 1))
    world.cache.unload(AdapterRef.parse("sql"), force=True)
    stale = one_row_each(generation, 1)
    for kind, request in (
        *((Kind.FORWARD, request) for request in (stale, one_row_each(generation, 2), b"garbage")),
        *((kind, b"garbage") for kind in (Kind.SET_MAPPING, Kind.RELEASE_MAPPING, Kind.FENCE)),
        (Kind.SET_MAPPING, mapping_request("sql")),
    ):
        with pytest.raises(Refused):
            await world.call(client, kind, request)
    client.close()
    await world.settle()
    assert open_descriptors() == before
