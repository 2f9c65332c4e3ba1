"""What a client writes where it should not: an answer where there is a cell for one, else the end of its connection."""

from __future__ import annotations

import os

import pytest
from slotcar.shm import region
from slotcar.shm.region import Kind, RegionGeometry
from slotcar.v1 import error_pb2
from slotcar_sidecar.core.errors import CapacityExceeded, LayoutStale
from slotcar_sidecar.ring.refusals import to_payload

from tests.unit.ring.raw import RawClient, Refused, mapping_request
from tests.unit.ring.world import World, one_row_each


async def served(world: World) -> tuple[RawClient, bytes]:
    """A client and a Forward of it."""
    await world.load("sql")
    client = await world.connect(world.session())
    return client, one_row_each(await world.map(client, "sql"), 1)


async def assert_ended(world: World, client: RawClient, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """The client's connection alone."""
    await world.settle()
    assert client.is_closed
    assert client.is_gone
    assert client.rings() > 0
    assert len(world.rings) == 0
    assert [session.planes for session in world.cache.sessions] == [{}]
    (record,) = (record for record in caplog.records if record.message == "plane ended")
    assert why in record.__dict__["fields"]["why"]
    other, payload = await served(world)
    await world.call(other, Kind.FORWARD, payload)


# Of one request


@pytest.mark.parametrize(
    ("kind", "sequence", "size"),
    [(0, 1, 4), (5, 1, 4), (1 << 31, 1, 4), (1, 1, region.PAYLOAD_BYTES + 1), (2, 1, (1 << 32) - 1), (1, 0, 4)],
)
async def test_a_bad_header_is_answered(world: World, kind: int, sequence: int, size: int) -> None:
    client, payload = await served(world)
    region.REQUEST.pack_into(client.memory, client.geometry.request_offset(3), sequence, kind, size)
    client.submit(3)
    client.ring()
    await world.settle()
    with pytest.raises(Refused) as refused:
        client.answer(3)
    assert (refused.value.reason, refused.value.error.metadata["field"]) == ("REQUEST_INVALID", "request")
    assert client.rings() == 2
    await world.call(client, Kind.FORWARD, payload)
    assert world.observer.tallies["ring"].reasons == {"OK": 1}


async def test_the_largest_payload_is_read(world: World) -> None:
    client, _ = await served(world)
    with pytest.raises(Refused) as refused:
        await world.call(client, Kind.FORWARD, bytes(region.PAYLOAD_BYTES))
    assert refused.value.error.metadata["field"] == "payload"


# Of the words


@pytest.mark.parametrize("jump", [-1, -2, region.CELLS + 1, 1 << 63, (1 << 64) - 10])
async def test_a_count_that_jumps_ends_the_connection(
    world: World, jump: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    client, payload = await served(world)
    for _ in range(2):
        await world.call(client, Kind.FORWARD, payload)
    client.words[region.SUBMITTED_OFFSET // 8] = (client.submitted + jump) % (1 << 64)
    client.ring()
    await assert_ended(world, client, "submitted", caplog)


async def test_a_count_that_is_being_written_says_nothing(world: World) -> None:
    """struct.pack_into writes zeros first.

    To see it fail: take 0 for a count in Channel.pending.
    """
    client, payload = await served(world)
    client.words[region.SUBMITTED_OFFSET // 8] = 0
    client.ring()
    await world.settle()
    assert not client.is_closed
    await world.call(client, Kind.FORWARD, payload)


@pytest.mark.parametrize("cell", [region.CELLS, (1 << 32) - 1])
async def test_a_cell_that_is_none_ends_the_connection(
    world: World, cell: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    client, _ = await served(world)
    client.submit(cell)
    client.ring()
    await assert_ended(world, client, f"is in cell {cell}", caplog)


async def test_a_cell_that_is_the_sidecars_ends_the_connection(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """To see it fail: do not look at `unanswered` in Channel.take; calls without number could wait."""
    caplog.set_level("INFO")
    client, _ = await served(world)
    cell = client.send(Kind.SET_MAPPING, mapping_request("sql"))
    client.send(Kind.SET_MAPPING, mapping_request("sql"), cell)
    await assert_ended(world, client, f"is in cell {cell}", caplog)


async def test_a_word_after_the_hand_shake_ends_the_connection(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    client, _ = await served(world)
    client.connection.send(b"more")
    await assert_ended(world, client, "sent something", caplog)


async def test_half_a_connection_is_none(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    client, _ = await served(world)
    client.connection.shutdown(1)  # it says that it will send no more
    await assert_ended(world, client, "gone", caplog)


async def test_what_the_sidecar_wrote_is_not_read_again(world: World) -> None:
    """Header, answers, and the closed word, which is the sidecar's alone."""
    client, payload = await served(world)
    client.memory[: region.CLOSED_OFFSET + 8] = b"\xff" * (region.CLOSED_OFFSET + 8)
    for cell in range(region.CELLS):
        at = client.geometry.answer_offset(cell)
        client.memory[at : at + 64] = b"\xff" * 64
    await world.call(client, Kind.FORWARD, payload)


async def test_requests_are_read_once(world: World) -> None:
    """A payload that changes while its kernel runs is the call that it was."""
    client, payload = await served(world)
    cell = client.send(Kind.FORWARD, payload)

    def scribble() -> None:
        client.fill(cell, 99, 77, b"\xff" * region.PAYLOAD_BYTES)

    world.device.before_kernel = scribble
    await world.settle()
    assert client.read(cell).status == 0
    assert client.read(cell).sequence == client.submitted


# Of the doorbells


async def test_bells_without_calls_are_heard_and_forgotten(world: World) -> None:
    client, payload = await served(world)
    for count in (1, 7, (1 << 64) - 20):
        os.eventfd_write(client.descriptors[1], count)
        await world.settle()
    os.eventfd_read(client.descriptors[1])
    await world.call(client, Kind.FORWARD, payload)


async def test_the_bell_of_a_channel_that_ended_is_not_heard(world: World) -> None:
    """To see it fail: leave the unregister out of RingThread._forget."""
    client, _ = await served(world)
    (ring,) = world.rings.threads
    client.connection.close()
    await world.settle()
    client.ring()
    assert ring._epoll.poll(0) == []


async def test_a_bell_that_nobody_reads_is_full_and_nothing_stops(world: World) -> None:
    """To see it fail: let Channel.ring raise BlockingIOError."""
    client, payload = await served(world)
    os.eventfd_read(client.descriptors[2])
    os.eventfd_write(client.descriptors[2], (1 << 64) - 2)
    for _ in range(3):
        await world.call(client, Kind.FORWARD, payload)


# Of the memory


async def test_the_region_keeps_its_size(world: World) -> None:
    client, payload = await served(world)
    for size in (0, client.opened.region_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(client.descriptors[0], size)
    await world.call(client, Kind.FORWARD, payload)


async def test_the_slots_are_for_reading_only(world: World) -> None:
    import mmap

    client = await world.connect(world.session(), "direct")
    with pytest.raises(PermissionError):
        mmap.mmap(client.descriptors[3], client.opened.slots_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(client.descriptors[3], b"x", 0)
    for size in (0, client.opened.slots_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(client.descriptors[3], size)


# Answers that are too long


def test_an_error_that_does_not_fit_loses_its_facts_and_then_its_end() -> None:
    error = LayoutStale("sentence " * 40, entries=tuple("name" * 10 for _ in range(40)))
    whole = error_pb2.Error.FromString(to_payload(error, 1 << 16))
    assert len(whole.metadata["entries"]) > 1000
    for room in (1000, 300, 100, 64):
        data = to_payload(error, room)
        found = error_pb2.Error.FromString(data)
        assert len(data) <= room
        assert (found.code, found.reason) == (whole.code, whole.reason)
        assert whole.message.startswith(found.message)
        assert not found.metadata
    assert error_pb2.Error.FromString(to_payload(error, 300)).message


def test_characters_are_not_cut() -> None:
    found = error_pb2.Error.FromString(to_payload(CapacityExceeded("äöü" * 100), 101))
    assert set(found.message) <= set("äöü")


def test_the_geometry_is_what_is_documented() -> None:
    geometry = RegionGeometry(1)
    assert geometry.cell_bytes == 2 * 64 + 2 * region.PAYLOAD_BYTES
    assert geometry.uses_offset % 64 == geometry.cells_offset % 64 == geometry.arena_offset % 4096 == 0
