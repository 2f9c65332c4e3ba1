"""The cache, step by step: victims, keeps, unloads and replaced versions."""

from __future__ import annotations

import asyncio

import pytest
from slotcar_sidecar.core.errors import (
    AdapterNotFound,
    AdapterNotResident,
    LayoutStale,
    SlotsExhausted,
)
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import SlotState

from tests.fakes.parts import (
    Bench,
    digest_of,
    make_bench,
    settle,
)
from tests.fakes.steps import (
    computed,
    finish,
    loaded,
    map_names,
    open_session,
    read_by,
    ref,
    start_load,
)


async def test_the_least_recently_used_adapter_gives_way_and_the_event_says_to_whom() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1")
    await loaded(bench, "b", "b1")
    session = open_session(bench)
    await computed(bench, session, map_names(bench, session, "a"))
    bench.cache.release_mapping(session, 0)
    await loaded(bench, "c", "c1")
    evicted = [event for event in bench.seen if event.kind is EventKind.EVICTED]
    assert [(str(event.name), event.reason) for event in evicted] == [("b", "slot taken by c")]


async def test_a_keep_protects_moves_on_replace_and_is_bounded() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1", keep=True)
    await loaded(bench, "b", "b1")
    with pytest.raises(SlotsExhausted):
        bench.cache.keep(ref("b"))
    await loaded(bench, "a", "a2", replace=True)
    resident = bench.cache.residency.describe(ref("a"))
    assert resident.keep
    assert resident.adapter.digest == digest_of("a2")
    await loaded(bench, "c", "c1")
    assert bench.cache.residency.describe(ref("a")).slot is not None
    bench.cache.release_keep(ref("a"))
    bench.cache.release_keep(ref("a"))
    bench.cache.keep(ref("c"))
    await loaded(bench, "d", "d1")
    bench.cache.release_keep(ref("c"))
    with pytest.raises(AdapterNotResident):
        bench.cache.keep(ref("a"))


async def test_unload_frees_every_tier() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1")
    unloaded = bench.cache.unload(ref("a"), force=False)
    assert unloaded.slot_state is SlotState.FREE
    assert digest_of("a1") not in bench.cache.tiers.host
    with pytest.raises(AdapterNotFound):
        bench.cache.unload(ref("a"), force=False)


async def test_an_unloaded_adapter_drains_while_it_is_pinned() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1")
    session, stranger = open_session(bench), open_session(bench)
    mapping = map_names(bench, session, "a")
    assert bench.cache.unload(ref("a"), force=False).slot_state is SlotState.DRAINING
    assert read_by(await computed(bench, session, mapping)) == [str(digest_of("a1"))]
    by_digest = f"a@{digest_of('a1')}"
    assert map_names(bench, session, by_digest, mapping_id=1).digests == (str(digest_of("a1")),)
    assert bench.cache.residency.describe(ref(by_digest)).slot == 0
    for who, name in ((stranger, by_digest), (session, "a")):
        with pytest.raises(AdapterNotFound):
            map_names(bench, who, name)
    bench.cache.release_mapping(session, 1)
    assert bench.cache.layout[SlotId(0)].state is SlotState.DRAINING
    bench.cache.release_mapping(session, 0)
    assert bench.cache.layout[SlotId(0)].state is SlotState.FREE


async def test_loading_the_digest_again_revives_a_draining_slot() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1")
    map_names(bench, open_session(bench), "a")
    bench.cache.unload(ref("a"), force=False)
    again = await loaded(bench, "again", "a1")
    assert again.already_resident
    assert bench.cache.layout[SlotId(0)].state is SlotState.OCCUPIED


async def test_force_makes_mappings_stale_at_once_and_leaves_other_names_alone() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1")
    await loaded(bench, "alias", "a1")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    assert bench.cache.unload(ref("alias"), force=True).pins_ended == 0
    await computed(bench, session, mapping)
    assert bench.cache.unload(ref("a"), force=True).pins_ended == 1
    with pytest.raises(LayoutStale) as refusal:
        await computed(bench, session, mapping)
    assert refusal.value.facts["entries"] == f"a@{digest_of('a1')}"
    with pytest.raises(AdapterNotFound):
        map_names(bench, session, f"a@{digest_of('a1')}")
    assert bench.seen[-1].kind is EventKind.FORWARD_STALE


async def test_a_replaced_adapter_serves_its_old_mapping_until_that_is_gone() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1")
    session = open_session(bench)
    old = map_names(bench, session, "a")
    await loaded(bench, "a", "a2", replace=True)
    new = map_names(bench, session, "a", mapping_id=1)
    assert read_by(await computed(bench, session, old)) == [str(digest_of("a1"))]
    assert read_by(await computed(bench, session, new)) == [str(digest_of("a2"))]
    bench.cache.release_mapping(session, 0)
    assert len(bench.cache.layout.in_state(SlotState.FREE)) == 1


async def test_a_failed_replace_changes_nothing() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    before = bench.cache.layout
    with pytest.raises(SlotsExhausted):
        await loaded(bench, "a", "a2", replace=True)
    assert bench.cache.layout == before
    assert bench.cache.residency.names.digest_of(ref("a")) == digest_of("a1")
    await computed(bench, session, mapping)


async def test_the_version_that_is_replaced_is_served_until_the_name_moves() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1")
    await loaded(bench, "b", "b1")
    session = open_session(bench)
    replacing = start_load(bench, "a", "a2", replace=True)
    await settle()
    bench.load_pool.run_one()
    await settle()
    assert map_names(bench, session, "a").digests == (str(digest_of("a1")),)
    (result,) = await finish(bench, replacing)
    assert result.resident.adapter.digest == digest_of("a2")
    with pytest.raises(AdapterNotResident):
        map_names(bench, session, "b", mapping_id=1)


async def test_a_replace_whose_fill_fails_leaves_the_old_version_resident() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1")
    await loaded(bench, "b", "b1")
    bench.device.fail_fill = RuntimeError("broken")
    with pytest.raises(RuntimeError):
        await loaded(bench, "a", "a2", replace=True)
    assert map_names(bench, open_session(bench), "a").digests == (str(digest_of("a1")),)


async def test_a_forced_unload_while_a_load_of_the_same_bytes_wakes_up() -> None:
    """The slot is freed between the end of the fill and the turn of the second load that waited for it."""
    bench = make_bench(2)
    first = start_load(bench, "a", "same")
    second = start_load(bench, "b", "same")
    for _ in range(2):
        await settle()
        bench.load_pool.run_one()
    while not first.done():
        await settle_one(bench)
    bench.cache.unload(ref("a"), force=True)
    one, two = await finish(bench, first, second)
    assert one.resident.slot == 0
    assert two.resident.slot is not None
    bench.cache.check_integrity()


async def settle_one(bench: Bench) -> None:
    """One turn of the loop, and whatever job waits."""
    await asyncio.sleep(0)
    if bench.load_pool.jobs:
        bench.load_pool.run_one()
