"""A client that writes anything anywhere, beside one that is served right all the while; and nothing is left of it.

What it writes is drawn near what is sound, so that it gets past the first check.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slotcar.shm import region
from slotcar.shm.region import ABSENT, Item, Kind
from slotcar_sidecar.core.pins import MappingOwner

from tests.unit.ring.raw import ARENA_BYTES, RawClient, Refused, forward_request, hello, mapping_request
from tests.unit.ring.world import MODEL, OUT, Q, World, one_row_each, open_descriptors, rows_of

Act = Callable[[RawClient, int], None]
"""What the hostile client does; it is told the generation of a sound mapping."""

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
FEW = st.integers(0, 40)
OFFSET = st.sampled_from([0, 4, 64, OUT, ARENA_BYTES - 64, ARENA_BYTES, (1 << 63), (1 << 64) - 64, ABSENT]) | U64
NEAR = st.integers(-3, 40)
"""A distance from what is right."""


@st.composite
def anywhere(draw: st.DrawFn) -> Act:
    """Bytes at a place of the region that is chosen by its meaning."""
    geometry = region.RegionGeometry(ARENA_BYTES)
    cell = draw(st.integers(0, region.CELLS - 1))
    starts = (0, 64, 128, 192, geometry.uses_offset, geometry.arena_offset)
    of_cell = (geometry.request_offset, geometry.answer_offset, geometry.request_payload_offset)
    start = draw(st.sampled_from((*starts, *(place(cell) for place in of_cell)))) + draw(st.integers(0, 70))
    data = draw(st.binary(min_size=1, max_size=80))

    def act(client: RawClient, generation: int) -> None:
        client.memory[start : start + len(data)] = data

    return act


@st.composite
def counts(draw: st.DrawFn) -> Act:
    """The number of calls, near the right one or anything."""
    distance, value = draw(NEAR), draw(st.none() | U64)

    def act(client: RawClient, generation: int) -> None:
        near = (client.submitted + distance) % (1 << 64)
        client.words[region.SUBMITTED_OFFSET // 8] = near if value is None else value

    return act


@st.composite
def requests(draw: st.DrawFn) -> Act:
    """A request whose header and payload are drawn, submitted in any cell."""
    kind = draw(st.sampled_from([*Kind, 0, 5]) | U32)
    size = draw(st.none() | FEW | U32)
    sequence = draw(st.none() | U64)
    cell = draw(st.integers(0, region.CELLS) | U32)
    payload = draw(payloads())

    def act(client: RawClient, generation: int) -> None:
        data, place = payload(generation), cell % region.CELLS
        number = client.submitted + 1 if sequence is None else sequence
        client.fill(place, number, kind, data[: region.PAYLOAD_BYTES])
        if size is not None:
            region.REQUEST.pack_into(client.memory, client.geometry.request_offset(place), number, kind, size)
        client.submit(cell)

    return act


@st.composite
def payloads(draw: st.DrawFn) -> Callable[[int], bytes]:
    """Bytes, messages, or Forwards whose fields are drawn."""
    which = draw(st.sampled_from(["bytes", "mapping", "forward", "cut"]))
    if which == "bytes":
        data = draw(st.binary(max_size=200))
        return lambda generation: data
    if which == "mapping":
        refs, many = draw(st.lists(st.sampled_from(["sql", "", "x@y", "absent"]), max_size=4)), draw(FEW)
        return lambda generation: mapping_request(*refs * many, mapping_id=many % 5)
    items = st.builds(Item, st.integers(0, 4) | U32, OFFSET, OFFSET, OFFSET, st.integers(0, 3) | U32, OFFSET)
    fields: dict[str, Any] = {
        "row_counts": draw(st.lists(FEW | U32, max_size=4)),
        "items": draw(st.lists(items, max_size=4)),
        "mapping_id": draw(st.integers(0, 2) | U64),
        "dtype": draw(st.integers(0, 3) | U32),
    }
    distance, cut = draw(NEAR), draw(st.integers(1, 90)) if which == "cut" else 0
    return lambda generation: forward_request(max(generation + distance, 0), **fields)[: -cut or None]


@st.composite
def rings(draw: st.DrawFn) -> Act:
    count = draw(st.sampled_from([1, 2, 1 << 40]))
    return lambda client, generation: os.eventfd_write(client.descriptors[1], count)


def _drain(client: RawClient, generation: int) -> None:
    client.rings()


def _fill_bell(client: RawClient, generation: int) -> None:
    client.rings()
    os.eventfd_write(client.descriptors[2], (1 << 64) - 2)


def _speak(client: RawClient, generation: int) -> None:
    client.connection.send(b"more")


ACTS = st.one_of(anywhere(), counts(), requests(), requests(), requests(), rings())
RARE = st.sampled_from([_drain, _fill_bell, _speak])
BURSTS = st.lists(st.lists(ACTS, min_size=1, max_size=12) | RARE.map(lambda act: [act]), min_size=1, max_size=5)


async def hostile_beside_honest(folder: Path, bursts: list[list[Act]]) -> None:
    world = World(folder / "s.shm")
    world.cache.adopt_model(MODEL)
    await world.load("sql", "chat")
    honest = await world.connect(world.session())
    generation = await world.map(honest, "sql", "", "chat")
    enemy_session = world.session()
    enemy, sound = await _enemy(world, str(enemy_session.session_id))
    for seed, burst in enumerate(bursts):
        for act in burst:
            act(enemy, sound)
        enemy.ring()
        await world.settle()
        x = rows_of(seed, 3, 32)
        honest.put(0, x)
        await world.call(honest, Kind.FORWARD, one_row_each(generation, 3))
        wanted = world.wanted(["sql", "", "chat"], Q, x)
        np.testing.assert_allclose(honest.get(OUT, (3, 32)), wanted, atol=1e-4)
        world.rings.look()
        world.cache.check_integrity()
        if enemy.is_gone:
            enemy.close()
            enemy, sound = await _enemy(world, str(enemy_session.session_id))
    enemy.close()
    await world.settle()
    assert len(world.rings) == 1
    assert not honest.is_closed
    assert world.cache.forwards_in_flight == 0
    assert not any(world.cache._state.marks.is_read(slot) for slot in range(world.slots))  # type: ignore[arg-type]
    owners = {owner for owners in world.cache.residency.pins.owners.values() for owner in owners}
    sessions = {session.session_id: session.mappings for session in world.cache.sessions}
    assert all(isinstance(owner, MappingOwner) and owner.mapping_id in sessions[owner.session] for owner in owners)
    assert ("INTERNAL" in {reason for _, reason in world.calls}) is False
    assert "INTERNAL" not in world.observer.tallies["ring"].reasons
    await world.close()


async def _enemy(world: World, session: str) -> tuple[RawClient, int]:
    """A connection of the hostile client, and the generation of a mapping that is sound, if it may have one more."""
    enemy = await world.say(hello(session, "direct"))
    try:
        return enemy, await world.map(enemy, "sql")
    except Refused:
        return enemy, 1


def run(bursts: list[list[Act]]) -> None:
    gc.collect()
    before = open_descriptors()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(hostile_beside_honest(Path(folder), bursts))
    gc.collect()
    assert open_descriptors() == before


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@given(bursts=BURSTS)
@settings(max_examples=15, derandomize=True, **QUIET)
def test_garbage_harms_its_own_session_alone(bursts: list[list[Act]]) -> None:
    run(bursts)


@pytest.mark.full
@pytest.mark.timeout(1800)
@given(bursts=BURSTS)
@settings(max_examples=500, **QUIET)
def test_much_garbage_harms_its_own_session_alone(bursts: list[list[Act]]) -> None:
    run(bursts)


@given(message=st.binary(max_size=200))
@settings(max_examples=25, derandomize=True, **QUIET)
def test_no_hello_is_too_strange(message: bytes) -> None:
    """It is refused, or, being empty, the end."""

    async def say(folder: Path) -> None:
        world = World(folder / "s.shm")
        with pytest.raises((Refused, EOFError)):
            await world.say(message)
        await world.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(say(Path(folder)))
