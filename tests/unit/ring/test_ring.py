"""Calls through a ring: what is answered, with what, and in which order."""

from __future__ import annotations

import logging
import struct
from typing import Any

import numpy as np
import pytest
from google.protobuf import duration_pb2
from slotcar.shm import region
from slotcar.shm.region import ABSENT, Item, Kind, fingerprint
from slotcar.v1 import engine_service_pb2 as pb
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import AdapterRef

from tests.unit.ring.raw import RawClient, Refused, forward_request, mapping_request
from tests.unit.ring.world import DOWN, IDLE_SECONDS, OUT, K, Q, World, one_row_each, rows_of

TOLERANCE = 1e-4


async def mapped(world: World, *names: str) -> tuple[RawClient, int]:
    """A client whose session has these adapters mapped, and the mapping's generation."""
    await world.load(*filter(None, dict.fromkeys(names)))
    client = await world.connect(world.session())
    return client, await world.map(client, *names)


# Forward


async def test_a_forward_has_the_rows_of_its_adapters(world: World) -> None:
    client, generation = await mapped(world, "sql", "", "chat")
    x = rows_of(1, 3, 32)
    client.put(0, x)
    answer = await world.call(client, Kind.FORWARD, one_row_each(generation, 3))
    np.testing.assert_allclose(client.get(OUT, (3, 32)), world.wanted(["sql", "", "chat"], Q, x), atol=TOLERANCE)
    digests = [str(world.source.weights[name].adapter.digest) if name else "" for name in ("sql", "", "chat")]
    assert answer.fingerprint == fingerprint(digests)
    assert answer.generation == world.cache.layout.generation
    tally = world.observer.tallies["ring"]
    assert (tally.reasons, tally.rows) == ({"OK": 1}, 3)


async def test_sites_that_share_an_input_go_in_one_call(world: World) -> None:
    client, generation = await mapped(world, "sql")
    x, wide = rows_of(1, 2, 32), rows_of(2, 2, 48)
    client.put(0, x)
    client.put(1024, wide)
    items = [Item(Q, 0, ABSENT, 4096), Item(K, 0, ABSENT, 8192), Item(DOWN, 1024, ABSENT, 12288)]
    await world.call(client, Kind.FORWARD, forward_request(generation, [2], items))
    for site, x_there, offset, columns in ((Q, x, 4096, 32), (K, x, 8192, 16), (DOWN, wide, 12288, 32)):
        wanted = world.wanted(["sql", "sql"], site, x_there)
        np.testing.assert_allclose(client.get(offset, (2, columns)), wanted, atol=TOLERANCE)


async def test_base_is_added_and_copied_for_the_base_model(world: World) -> None:
    client, generation = await mapped(world, "sql", "")
    x, base = rows_of(1, 2, 32), rows_of(2, 2, 32)
    client.put(0, x)
    client.put(1024, base)
    await world.call(client, Kind.FORWARD, forward_request(generation, [1, 1], [Item(Q, 0, 1024, 4096)]))
    found, delta = client.get(4096, (2, 32)), world.wanted(["sql", ""], Q, x)
    np.testing.assert_allclose(found, base + delta, atol=TOLERANCE)
    assert found[1].tobytes() == base[1].tobytes()


async def test_every_dtype_of_the_layout(world: World) -> None:
    client, generation = await mapped(world, "sql")
    x = rows_of(1, 1, 32)
    wanted = world.wanted(["sql"], Q, x)
    client.put(0, x.astype(np.float16))
    await world.call(client, Kind.FORWARD, one_row_each(generation, 1, dtype=1))
    start = client.geometry.arena_offset + OUT
    found = np.frombuffer(client.memory[start : start + 64], dtype=np.float16).astype(np.float32)
    np.testing.assert_allclose(found[None], wanted, atol=0.05)
    # bfloat16 is the upper half of float32.
    client.put(0, (x.view(np.uint32) >> 16).astype(np.uint16))
    await world.call(client, Kind.FORWARD, one_row_each(generation, 1, dtype=2))
    halves = np.frombuffer(client.memory[start : start + 64], dtype=np.uint16).astype(np.uint32)
    np.testing.assert_allclose((halves << 16).view(np.float32)[None], wanted, atol=0.2)


async def test_no_rows_are_no_fault(world: World) -> None:
    """All tensors may lie at one place then, whatever their width."""
    client, generation = await mapped(world, "sql")
    items = [Item(site, 0, ABSENT, 0) for site in (DOWN, K, Q)]
    await world.call(client, Kind.FORWARD, forward_request(generation, [0], items))


async def test_the_same_payload_is_prepared_once_and_reads_what_is_there_now(world: World) -> None:
    """To see it fail: keep the result in ChannelForwards, or prepare each time."""
    client, generation = await mapped(world, "sql")
    for seed in range(3):
        x = rows_of(seed, 1, 32)
        client.put(0, x)
        await world.call(client, Kind.FORWARD, one_row_each(generation, 1))
        np.testing.assert_allclose(client.get(OUT, (1, 32)), world.wanted(["sql"], Q, x), atol=TOLERANCE)
    assert world.device.prepared == 1


async def test_another_payload_is_another_call(world: World) -> None:
    client, generation = await mapped(world, "sql", "chat")
    x = rows_of(1, 3, 32)
    client.put(0, x)
    for counts, names in (([1, 2], ["sql", "chat", "chat"]), ([2, 1], ["sql", "sql", "chat"])):
        await world.call(client, Kind.FORWARD, forward_request(generation, counts, [Item(Q, 0, ABSENT, OUT)]))
        np.testing.assert_allclose(client.get(OUT, (3, 32)), world.wanted(names, Q, x), atol=TOLERANCE)
    assert world.device.prepared == 2


async def test_the_number_of_prepared_calls_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotcar_sidecar.ring.forwards._MOST_PREPARED", 2)
    client, generation = await mapped(world, "sql")
    for offset in (0, 1024, 2048, 2048, 0):
        payload = forward_request(generation, [1], [Item(Q, offset, ABSENT, OUT)])
        await world.call(client, Kind.FORWARD, payload)
    assert world.device.prepared == 4


async def test_what_is_prepared_for_a_mapping_ends_with_it(world: World) -> None:
    """To see it fail: do not ask is_of_now in ChannelForwards.prepared."""
    client, generation = await mapped(world, "sql")
    payload = one_row_each(generation, 1)
    await world.call(client, Kind.FORWARD, payload)
    await world.call(client, Kind.RELEASE_MAPPING, pb.ReleaseMappingRequest(mapping_id=1).SerializeToString())
    with pytest.raises(Refused) as refused:
        await world.call(client, Kind.FORWARD, payload)
    assert refused.value.reason == "MAPPING_NOT_FOUND"
    again = await world.map(client, "sql")
    with pytest.raises(Refused) as refused:
        await world.call(client, Kind.FORWARD, payload)
    assert refused.value.reason == "LAYOUT_STALE"
    await world.call(client, Kind.FORWARD, one_row_each(again, 1))


async def test_a_slot_that_was_taken_by_force_is_not_read(world: World) -> None:
    """Of many refusals the owner learns once for each time that it looks.

    To see it fail: drop both calls of check_current in ThreadForwards.execute.
    """
    client, generation = await mapped(world, "sql")
    payload = one_row_each(generation, 1)
    await world.call(client, Kind.FORWARD, payload)
    world.cache.unload(AdapterRef.parse("sql"), force=True)
    cells = [client.send(Kind.FORWARD, payload) for _ in range(4)]
    await world.settle()
    for cell in cells:
        with pytest.raises(Refused) as refused:
            client.answer(cell)
        assert refused.value.reason == "LAYOUT_STALE"
        assert refused.value.error.metadata["entries"].startswith("sql@sha256:")
    assert world.observer.tallies["ring"].reasons == {"OK": 1, "LAYOUT_STALE": 4}
    stale = [event for event in world.cache.events.since(0) if event.kind is EventKind.FORWARD_STALE]
    assert len(stale) == 1


async def test_a_forward_renews_the_pins_of_a_mapping_that_was_idle(world: World) -> None:
    client, generation = await mapped(world, "sql")
    world.clock.now += IDLE_SECONDS + 1
    world.cache.expire()
    assert not world.cache.residency.pins.pinned()
    await world.call(client, Kind.FORWARD, one_row_each(generation, 1))
    assert len(world.cache.residency.pins.pinned()) == 1
    world.cache.check_integrity()


async def test_forwards_are_counted_while_the_server_shuts_down(world: World) -> None:
    client, generation = await mapped(world, "sql")
    seen: list[tuple[int, int]] = []
    (session,) = world.cache.sessions
    world.device.before_kernel = lambda: seen.append((world.cache.forwards_in_flight, world.cache.running(session)))
    world.clock.now += 5
    await world.call(client, Kind.FORWARD, one_row_each(generation, 1))
    assert seen == [(1, 1)]
    assert (world.cache.forwards_in_flight, world.cache.running(session)) == (0, 0)
    assert world.cache.last_forward_at == world.clock.now


async def test_without_a_model_a_forward_is_refused(modelless: World) -> None:
    client = await modelless.connect(modelless.session())
    generation = await modelless.map(client, "")
    with pytest.raises(Refused) as refused:
        await modelless.call(client, Kind.FORWARD, one_row_each(generation, 1))
    assert refused.value.reason == "MODEL_UNKNOWN"


HUGE = (1 << 64) - 64
BAD_FORWARDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown mapping": ({"mapping_id": 9}, "MAPPING_NOT_FOUND", ""),
    "another generation": ({"generation": 1 << 63}, "LAYOUT_STALE", ""),
    "no item": ({"items": []}, "REQUEST_INVALID", "items"),
    "a site twice": ({"items": [Item(Q, 0, ABSENT, OUT)] * 2}, "REQUEST_INVALID", "items[1].site"),
    "more items than sites": ({"items": [Item(Q, 0, ABSENT, OUT)] * 4}, "REQUEST_INVALID", "items"),
    "an unknown site": ({"items": [Item(3, 0, ABSENT, OUT)]}, "SITE_UNKNOWN", "items[0].site"),
    "an unknown dtype": ({"dtype": 3}, "REQUEST_INVALID", "dtype"),
    "too few counts": ({"row_counts": []}, "SHAPE_MISMATCH", "row_counts"),
    "too many counts": ({"row_counts": [1, 1]}, "SHAPE_MISMATCH", "row_counts"),
    "too many entries": ({"row_counts": [0] * 4097}, "REQUEST_INVALID", "row_counts"),
    "too many rows": ({"row_counts": [(1 << 32) - 1]}, "REQUEST_INVALID", "items[0].x_offset"),
    "x out of line": ({"items": [Item(Q, 4, ABSENT, OUT)]}, "REQUEST_INVALID", "items[0].x_offset"),
    "x at the end": ({"items": [Item(Q, 1 << 16, ABSENT, OUT)]}, "REQUEST_INVALID", "items[0].x_offset"),
    "x beyond": ({"items": [Item(Q, HUGE, ABSENT, OUT)]}, "REQUEST_INVALID", "items[0].x_offset"),
    "x over the end": ({"items": [Item(Q, (1 << 16) - 64, ABSENT, OUT)]}, "REQUEST_INVALID", "items[0].x_offset"),
    "base beyond": ({"items": [Item(Q, 0, HUGE, OUT)]}, "REQUEST_INVALID", "items[0].base_offset"),
    "out beyond": ({"items": [Item(Q, 0, ABSENT, HUGE)]}, "REQUEST_INVALID", "items[0].out_offset"),
}


@pytest.mark.parametrize("case", BAD_FORWARDS)
async def test_a_bad_forward_is_refused_and_the_ring_goes_on(world: World, case: str) -> None:
    changes, reason, field = BAD_FORWARDS[case]
    client, generation = await mapped(world, "sql")
    sound = {"generation": generation, "row_counts": [1], "items": [Item(Q, 0, ABSENT, OUT)]}
    with pytest.raises(Refused) as refused:
        await world.call(client, Kind.FORWARD, forward_request(**sound | changes))
    assert (refused.value.reason, refused.value.error.metadata.get("field", "")) == (reason, field)
    assert world.observer.tallies["ring"].reasons == {reason: 1}
    await world.call(client, Kind.FORWARD, one_row_each(generation, 1))


@pytest.mark.parametrize("payload", [b"", b"\0" * 31, b"\xff" * 64, struct.pack("<2Q3I4x", 1, 1, 0, 1 << 31, 1 << 31)])
async def test_a_payload_that_is_no_forward_is_refused(world: World, payload: bytes) -> None:
    client, generation = await mapped(world, "sql")
    with pytest.raises(Refused) as refused:
        await world.call(client, Kind.FORWARD, payload)
    assert (refused.value.reason, refused.value.error.metadata["field"]) == ("REQUEST_INVALID", "payload")
    await world.call(client, Kind.FORWARD, one_row_each(generation, 1))


# The order of answers


async def test_calls_are_pipelined(world: World) -> None:
    """As many as there are cells, and again; the doorbell rings for each."""
    client, generation = await mapped(world, "sql")
    assert client.rings() == 1
    for _ in range(2):
        cells = [client.send(Kind.FORWARD, one_row_each(generation, 1)) for _ in range(region.CELLS)]
        await world.settle()
        for cell in cells:
            client.answer(cell)
        assert client.rings() == region.CELLS


async def test_cells_are_used_in_any_order(world: World) -> None:
    client, generation = await mapped(world, "sql")
    for cell in (7, 31, 0, 7):
        client.send(Kind.FORWARD, one_row_each(generation, 1), cell)
        await world.settle()
        client.answer(cell)


async def test_channels_take_turns(world: World) -> None:
    """To see it fail: serve all that a channel has submitted before the next."""
    first, generation = await mapped(world, "sql")
    second = await world.connect(world.session())
    other = await world.map(second, "sql")
    order: list[str] = []
    for _ in range(20):
        first.send(Kind.FORWARD, one_row_each(generation, 1))
        second.send(Kind.FORWARD, one_row_each(other, 1))
    (ring,) = world.rings.threads
    names = {session.session_id: name for session, name in zip(world.cache.sessions, "ab", strict=True)}
    world.device.before_kernel = lambda: order.append(names[ring._forwards._mark.reader.session_id])  # type: ignore[union-attr]
    await world.settle()
    assert len(order) == 40
    runs = "".join(order).replace("ab", "a b").replace("ba", "b a").split()
    assert {len(run) for run in runs} == {4, 8}


async def test_a_mapping_that_waits_holds_no_forward_up(world: World) -> None:
    """Its answer comes last; the mapping of before is good meanwhile."""
    await world.load("a", "b", "c", "d")
    holder = await world.connect(world.session())
    await world.map(holder, "b", "c", "d")
    client = await world.connect(world.session())
    generation = await world.map(client, "")
    waiting = client.send(
        Kind.SET_MAPPING, mapping_request("a", load=True, wait=duration_pb2.Duration(seconds=60), mapping_id=2)
    )
    await world.settle()
    for _ in range(region.CELLS + 3):
        cell = client.submitted % region.CELLS
        await_cell = cell if cell != waiting else (waiting + 1) % region.CELLS
        client.send(Kind.FORWARD, one_row_each(generation, 1), await_cell)
        await world.settle()
        client.answer(await_cell)
    assert client.read(waiting).sequence != waiting + 1
    await world.call(holder, Kind.RELEASE_MAPPING, pb.ReleaseMappingRequest(mapping_id=1).SerializeToString())
    await world.settle()
    assert len(pb.SetMappingResponse.FromString(client.answer(waiting).payload).entries) == 1


# Calls that are RPCs


async def test_set_mapping_answers_as_the_rpc_does(world: World) -> None:
    await world.load("sql")
    session = world.session()
    client = await world.connect(session)
    answer = await world.call(client, Kind.SET_MAPPING, mapping_request("sql", "", session=str(session.session_id)))
    response = pb.SetMappingResponse.FromString(answer.payload)
    mapping = session.mappings[1]
    assert response.generation == mapping.generation
    assert [entry.digest for entry in response.entries] == list(mapping.digests)
    assert response.layout.epoch == client.epoch == "e" * 16
    assert world.calls[-1] == ("SetMapping", "OK")


async def test_a_refused_call_is_counted_and_answered(world: World) -> None:
    client = await world.connect(world.session())
    with pytest.raises(Refused) as refused:
        await world.call(client, Kind.SET_MAPPING, mapping_request("absent"))
    assert refused.value.reason == "ADAPTER_NOT_FOUND"
    assert refused.value.error.metadata["adapters"] == "absent"
    assert world.calls[-1] == ("SetMapping", "ADAPTER_NOT_FOUND")


async def test_a_fault_of_ours_is_internal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client, generation = await mapped(world, "sql")

    def fault(*_: object) -> None:
        raise ZeroDivisionError

    # A log that is kept keeps what the frames of the fault have.
    monkeypatch.setattr(logging.getLogger("slotcar.ring"), "disabled", True)
    world.device.before_kernel = fault
    with pytest.raises(Refused) as refused:
        await world.call(client, Kind.FORWARD, one_row_each(generation, 1))
    assert refused.value.reason == "INTERNAL"
    monkeypatch.setattr(world.cache, "release_mapping", fault)
    with pytest.raises(Refused) as refused:
        await world.call(client, Kind.RELEASE_MAPPING, b"")
    assert refused.value.reason == "INTERNAL"


@pytest.mark.parametrize("kind", [Kind.SET_MAPPING, Kind.RELEASE_MAPPING, Kind.FENCE])
async def test_no_ring_speaks_for_another_session(world: World, kind: Kind) -> None:
    """To see it fail: leave out Calls._check_session."""
    client, other = await world.connect(world.session()), world.session()
    request = pb.FenceRequest(session=str(other.session_id))  # the session is field 1 of each
    with pytest.raises(Refused) as refused:
        await world.call(client, kind, request.SerializeToString())
    assert (refused.value.reason, refused.value.error.metadata["field"]) == ("REQUEST_INVALID", "session")


@pytest.mark.parametrize("kind", [Kind.SET_MAPPING, Kind.RELEASE_MAPPING, Kind.FENCE])
async def test_bytes_that_are_no_message_are_refused(world: World, kind: Kind) -> None:
    client = await world.connect(world.session())
    with pytest.raises(Refused) as refused:
        await world.call(client, kind, b"\xff" * 9)
    assert (refused.value.reason, refused.value.error.metadata["field"]) == ("REQUEST_INVALID", "request")


async def test_a_mapping_whose_answer_would_not_fit_is_not_set(world: World) -> None:
    """By targets it does, however many the entries are."""
    await world.load("sql")
    session = world.session()
    client = await world.connect(session)
    with pytest.raises(Refused) as refused:
        await world.call(client, Kind.SET_MAPPING, mapping_request(*["sql"] * 1000))
    assert refused.value.reason == "CAPACITY_EXCEEDED"
    assert not session.mappings
    request = pb.SetMappingRequest(mapping_id=1, targets=[pb.MappingEntry(ref="sql")], indices=[0] * 4096)
    await world.call(client, Kind.SET_MAPPING, request.SerializeToString())
    assert len(session.mappings[1].entries) == 4096


async def test_the_largest_answer_that_is_allowed_fits(world: World) -> None:
    """To see it fail: say in ring/calls.py that an entry takes less than it does."""
    await world.load("sql")
    client = await world.connect(world.session())
    answer = await world.call(client, Kind.SET_MAPPING, mapping_request(*["sql"] * 816))
    assert len(answer.payload) <= region.PAYLOAD_BYTES


async def test_a_fence_behind_forwards_is_answered_behind_them(world: World) -> None:
    client, generation = await mapped(world, "sql")
    forward, fence = client.send(Kind.FORWARD, one_row_each(generation, 1)), client.send(Kind.FENCE, b"")
    await world.settle()
    client.answer(forward)
    assert pb.FenceResponse.FromString(client.answer(fence).payload).layout.epoch == client.epoch


async def test_a_load_is_done_by_the_mapping(world: World) -> None:
    await world.load("a", "b", "c", "d")
    client = await world.connect(world.session())
    assert world.cache.layout.find(world.source.weights["a"].adapter.digest) is None
    await world.map(client, "a", load=True)
    await world.cache.load(LoadCall(AdapterRef.parse("a")))
    assert world.cache.layout.find(world.source.weights["a"].adapter.digest) is not None
