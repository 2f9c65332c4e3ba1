"""Holds and reservations at the cache: what a session keeps, of which nobody else can deprive it but by force."""

from __future__ import annotations

import asyncio

import pytest
from slotcar_sidecar.core.errors import (
    AdapterNotFound,
    CapacityExceeded,
    RequestInvalid,
    SessionNotFound,
    SourceUnavailable,
)
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.holds import MAX_HOLD_SECONDS
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.layout import SlotState

from tests.fakes.parts import digest_of, make_bench, settle
from tests.fakes.steps import (
    computed,
    finish,
    held,
    hold_terms,
    loaded,
    map_names,
    mapping_call,
    open_session,
    read_by,
    ref,
    run_all,
    run_to_fills,
    start_hold,
    start_load,
)


def by_digest(name: str, content: str) -> str:
    return f"{name}@{digest_of(content)}"


async def test_held_bytes_stay_and_come_back_under_their_digest_though_the_name_moved() -> None:
    """A request that was preempted comes back to the same bytes."""
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    session, stranger = open_session(bench), open_session(bench)
    hold = await held(bench, session, "a")
    assert (hold.digest, hold.slot) == (digest_of("a1"), False)
    await loaded(bench, "b", "b")
    del bench.source.contents["/a"]
    bench.source.contents["/a"] = "a2"
    await loaded(bench, "a", "a2", replace=True)
    call = mapping_call(session, by_digest("a", "a1"), load=True)
    (mapping,) = await finish(bench, asyncio.create_task(bench.cache.set_mapping(call)))
    assert read_by(await computed(bench, session, mapping)) == [str(digest_of("a1"))]
    assert bench.cache.layout.in_state(SlotState.DRAINING)
    with pytest.raises(AdapterNotFound):
        map_names(bench, stranger, by_digest("a", "a1"))
    bench.cache.release_hold(session, 1)
    bench.cache.release_mapping(session, 0)
    assert digest_of("a1") not in bench.cache.tiers.host
    assert not bench.cache.layout.in_state(SlotState.DRAINING, SlotState.OCCUPIED)


async def test_the_host_tier_drops_others_and_refuses_rather_than_what_is_held() -> None:
    bench = make_bench(1, host_bytes=2)
    session = open_session(bench)
    await loaded(bench, "a", "a")
    await held(bench, session, "a", 1)
    await loaded(bench, "b", "b")
    await loaded(bench, "c", "c")
    assert digest_of("a") in bench.cache.tiers.host
    await held(bench, session, "c", 2)
    with pytest.raises(CapacityExceeded):
        await loaded(bench, "d", "d")
    bench.cache.release_hold(session, 1)
    await loaded(bench, "d", "d")


async def test_the_time_of_a_hold_counts_from_when_the_bytes_are_there() -> None:
    bench = make_bench(1)
    session = open_session(bench)
    task = start_load(bench, "a", "a", hold=hold_terms(session, seconds=10.0))
    await settle()
    bench.clock.now += 60.0
    bench.cache.expire()
    await finish(bench, task)
    bench.clock.now += 9.0
    bench.cache.expire()
    assert bench.cache.residency.holds.is_held(digest_of("a"))
    bench.clock.now += 1.0
    bench.cache.expire()
    assert not bench.cache.residency.holds.is_held(digest_of("a"))
    last = bench.seen[-1]
    assert (last.kind, last.reason, last.session) == (EventKind.HOLD_RELEASED, "its time is over", session)


async def test_a_hold_of_what_was_dropped_reads_it_again_or_is_refused() -> None:
    bench = make_bench(1)
    session = open_session(bench)
    await loaded(bench, "a", "a")
    bench.cache.tiers.host.drop(digest_of("a"))
    await held(bench, session, "a", 1)
    await loaded(bench, "b", "b")
    bench.cache.tiers.host.drop(digest_of("b"))
    del bench.source.contents["/b"]
    with pytest.raises(SourceUnavailable):
        await held(bench, session, "b", 2)
    assert len(bench.cache.residency.holds) == 1


async def test_a_repeat_is_one_hold_another_ref_replaces_it_and_releases_are_idempotent() -> None:
    bench = make_bench(2)
    session, other = open_session(bench), open_session(bench)
    for name in ("a", "b"):
        await loaded(bench, name, name)
    await held(bench, session, "a", seconds=5.0)
    bench.clock.now += 4.0
    again = await held(bench, session, "a", seconds=5.0)
    assert again.expires_at == bench.clock.now + 5.0
    await held(bench, session, "b")
    assert [hold.digest for hold in bench.cache.residency.holds] == [digest_of("b")]
    bench.cache.release_hold(other, 1)
    assert bench.cache.residency.holds.is_held(digest_of("b"))
    bench.cache.release_hold(session, 1)
    bench.cache.release_hold(session, 1)
    assert not len(bench.cache.residency.holds)


async def test_a_forced_unload_ends_holds_and_counts_them() -> None:
    bench = make_bench(2)
    session = open_session(bench, reserved_slots=1)
    await loaded(bench, "a", "a")
    await held(bench, session, "a", 1)
    await held(bench, session, "a", 2, slot=True)
    mapping = map_names(bench, session, "a")
    assert bench.cache.unload(ref("a"), force=True).pins_ended == 3
    assert not len(bench.cache.residency.holds)
    assert digest_of("a") not in bench.cache.tiers.host
    with pytest.raises(AdapterNotFound):
        map_names(bench, session, by_digest("a", "a"))
    assert mapping.generation < bench.cache.layout.generation
    bench.cache.check_integrity()


async def test_a_hold_ends_with_its_session_and_there_is_none_for_a_session_that_is_gone() -> None:
    bench = make_bench(1)
    session = open_session(bench)
    await loaded(bench, "a", "a")
    bench.cache.tiers.host.drop(digest_of("a"))
    task = start_hold(bench, session, "a", slot=True)
    bench.cache.close_session(session)
    (result,) = await finish(bench, task)
    assert isinstance(result, SessionNotFound)
    session = open_session(bench)
    await held(bench, session, "a")
    bench.cache.unload(ref("a"), force=False)
    assert digest_of("a") in bench.cache.tiers.host
    bench.cache.close_session(session)
    assert digest_of("a") not in bench.cache.tiers.host
    bench.cache.check_integrity()


async def test_holds_are_bounded() -> None:
    bench = make_bench(1)
    session = open_session(bench)
    await loaded(bench, "a", "a")
    for hold_id in range(8):
        await held(bench, session, "a", hold_id)
    with pytest.raises(CapacityExceeded):
        await held(bench, session, "a", 8)
    await held(bench, session, "a", 7)


@pytest.mark.parametrize("seconds", [0.0, -1.0, MAX_HOLD_SECONDS + 1, float("nan"), float("inf")])
def test_a_time_beyond_its_bounds_is_refused(seconds: float) -> None:
    with pytest.raises(RequestInvalid):
        hold_terms(SessionId("s"), seconds=seconds)


async def test_a_slot_that_drains_for_a_hold_under_way_can_be_taken() -> None:
    """The hold wants the bytes alone, so the slot is nobody's though its digest is not forgotten."""
    bench = make_bench(1)
    session = open_session(bench)
    await loaded(bench, "a", "a")
    map_names(bench, session, "a")
    bench.cache.unload(ref("a"), force=False)
    bench.cache.tiers.host.drop(digest_of("a"))
    holding = start_hold(bench, session, by_digest("a", "a"))
    await settle()
    bench.cache.release_mapping(session, 0)
    assert bench.cache.layout.in_state(SlotState.DRAINING)
    taking = start_load(bench, "b", "b")
    await settle()
    bench.load_pool.run_one(1)
    await settle()
    assert bench.cache.layout.in_state(SlotState.FILLING)
    bench.cache.check_integrity()
    hold, _ = await finish(bench, holding, taking)
    assert isinstance(hold, AdapterNotFound), "nothing of the session had it when the hold took effect"
    bench.cache.check_integrity()


async def test_a_hold_that_is_released_before_it_takes_effect_is_none() -> None:
    bench = make_bench(1)
    session = open_session(bench)
    await loaded(bench, "a", "a")
    bench.cache.tiers.host.drop(digest_of("a"))
    holding = start_hold(bench, session, "a")
    loading = start_load(bench, "b", "b", hold=hold_terms(session, 2))
    await settle()
    for hold_id in (1, 2):
        bench.cache.release_hold(session, hold_id)
    hold, report = await finish(bench, holding, loading)
    assert (hold.digest, hold.slot) == (digest_of("a"), False)
    assert report.hold is None
    assert not len(bench.cache.residency.holds)


async def test_a_hold_whose_caller_goes_away_is_none() -> None:
    bench = make_bench(1)
    session = open_session(bench)
    await loaded(bench, "a", "a")
    bench.cache.tiers.host.drop(digest_of("a"))
    tasks = [start_hold(bench, session, "a"), start_load(bench, "b", "b", hold=hold_terms(session, 2))]
    await settle()
    for task in tasks:
        task.cancel()
    await run_all(bench)
    assert not len(bench.cache.residency.holds)
    assert bench.cache.residency.describe(ref("b")).slot is not None, "the load itself outlives its caller"


async def test_a_hold_of_a_name_that_moves_meanwhile_holds_what_the_name_has_then() -> None:
    bench = make_bench(3)
    for name in ("sql", "x", "y", "z"):
        await loaded(bench, name, name)
    session = open_session(bench, reserved_slots=1)
    holding = start_hold(bench, session, "sql", slot=True)
    await run_to_fills(bench)
    replacing = start_load(bench, "sql", "sql2", replace=True)
    await run_to_fills(bench)
    while bench.load_pool.jobs:
        bench.load_pool.run_one(len(bench.load_pool.jobs) - 1)
        await settle()
    hold, _ = await finish(bench, holding, replacing)
    assert hold.digest == bench.cache.residency.names.digest_of(ref("sql"))


async def test_a_load_whose_hold_is_refused_names_nothing() -> None:
    bench = make_bench(1)
    session = open_session(bench)
    task = start_load(bench, "a", "a", hold=hold_terms(session))
    await run_to_fills(bench)
    bench.cache.close_session(session)
    (result,) = await finish(bench, task)
    assert isinstance(result, SessionNotFound)
    assert not len(bench.cache.residency.names)


async def test_holds_that_come_with_loads_are_bounded_too() -> None:
    bench = make_bench(1)
    session = open_session(bench)
    for hold_id in range(8):
        await loaded(bench, "a", "a", hold=hold_terms(session, hold_id))
    with pytest.raises(CapacityExceeded):
        await loaded(bench, "a", "a", hold=hold_terms(session, 8))
    assert len(bench.cache.residency.holds) == 8
