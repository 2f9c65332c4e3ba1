"""What clients of the direct plane say that they computed: counted once, and their mappings keep their pins."""

from __future__ import annotations

import pytest
from slotcar.shm import region
from slotcar.shm.region import Kind
from slotcar_sidecar.ring.uses import MOST_CALLS, NOTHING, Growth, Uses

from tests.unit.ring.raw import RawClient
from tests.unit.ring.world import IDLE_SECONDS, World, one_row_each

MAX_ROWS = 100


def block(*uses: tuple[int, int, int]) -> bytes:
    data = b"".join(region.USE.pack(*use, 0) for use in uses)
    return data.ljust(region.USE.size * region.USES, b"\0")


def grown(calls: int, rows: int, *generations: int) -> Growth:
    return Growth(frozenset(generations), calls, rows)


def test_only_what_is_new_counts() -> None:
    uses = Uses(MAX_ROWS)
    assert uses.look(block()) == NOTHING
    assert uses.look(block((7, 3, 9))) == grown(3, 9, 7)
    assert uses.look(block((7, 3, 9))) == NOTHING
    assert uses.look(block((7, 4, 10), (8, 1, 2))) == grown(2, 3, 7, 8)
    assert uses.look(block((8, 2, 4), (7, 4, 10))) == grown(1, 2, 8), "a use may move"


@pytest.mark.parametrize("garbage", [(7, 0, 0), (7, 2, 9), (7, 3, 0), (0, 50, 50)])
def test_counts_that_go_back_say_nothing(garbage: tuple[int, int, int]) -> None:
    """To see it fail: keep what stands there instead of the most that stood there."""
    uses = Uses(MAX_ROWS)
    uses.look(block((7, 3, 9), (8, 1, 1)))
    assert uses.look(block(garbage, (8, 1, 1))).calls == 0
    assert uses.look(block((7, 3, 9), (8, 1, 1))).calls == 0
    assert uses.look(block((7, 4, 10), (8, 1, 1))) == grown(1, 1, 7)


def test_a_generation_that_comes_twice_is_one() -> None:
    uses = Uses(MAX_ROWS)
    assert uses.look(block((7, 3, 9), (7, 2, 4), (7, 1, 11))) == grown(3, 11, 7)


def test_no_look_believes_more_than_can_be() -> None:
    uses = Uses(MAX_ROWS)
    most = (1 << 64) - 1
    assert uses.look(block((1, most, most), (2, most, most))) == grown(MOST_CALLS, MOST_CALLS * MAX_ROWS, 1, 2)
    assert uses.look(block((3, 1, most))) == grown(1, MAX_ROWS, 3)


def use(client: RawClient, *use: int) -> None:
    region.USE.pack_into(client.memory, client.geometry.use_offset(5), *use, 0)


async def test_a_mapping_in_use_keeps_its_pins(world: World) -> None:
    """To see it fail: leave the touch out of AdapterCache.used_elsewhere."""
    await world.load("sql")
    session = world.session()
    client = await world.connect(session, "direct")
    generation = await world.map(client, "sql")
    for calls in range(1, 4):
        world.clock.now += IDLE_SECONDS / 2
        use(client, generation, calls, 8 * calls)
        world.rings.look()
        world.cache.expire()
    assert world.cache.residency.pins.pinned()
    assert session.last_used[1] == world.clock.now == world.cache.last_forward_at
    tally = world.observer.tallies["direct"]
    assert (tally.reasons, tally.rows, sum(tally.buckets)) == ({"OK": 3}, 24, 0)
    world.clock.now += IDLE_SECONDS
    world.rings.look()
    world.cache.expire()
    assert not world.cache.residency.pins.pinned()
    use(client, generation, 4, 32)
    world.rings.look()
    assert world.cache.residency.pins.pinned()


async def test_nobody_uses_the_mapping_of_another(world: World) -> None:
    await world.load("sql")
    one, two = world.session(), world.session()
    client, other = await world.connect(one, "direct"), await world.connect(two, "direct")
    generation = await world.map(client, "sql")
    before = one.last_used[1]
    world.clock.now += 1
    use(other, generation, 1, 1)
    world.rings.look()
    assert one.last_used[1] == before


async def test_a_ring_has_no_uses_to_count(world: World) -> None:
    client = await world.connect(world.session())
    use(client, 1, 1, 1)
    world.rings.look()
    assert world.observer.tallies["direct"].reasons == {}


async def test_a_direct_client_may_let_the_sidecar_compute(world: World) -> None:
    await world.load("sql")
    client = await world.connect(world.session(), "direct")
    generation = await world.map(client, "sql")
    await world.call(client, Kind.FORWARD, one_row_each(generation, 1))
