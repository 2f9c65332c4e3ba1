"""The cache, step by step: slots that sessions reserve, that holds keep inside them, and that keeps leave them."""

from __future__ import annotations

import asyncio

import pytest
from slotcar_sidecar.core.errors import (
    RequestInvalid,
    SlotsExhausted,
)

from tests.fakes.parts import digest_of, make_bench, settle
from tests.fakes.steps import (
    finish,
    held,
    hold_terms,
    loaded,
    map_names,
    mapping_call,
    open_session,
    ref,
    start_load,
)


async def test_a_hold_keeps_a_slot_only_inside_the_reservation() -> None:
    bench = make_bench(3)
    session, other = open_session(bench, reserved_slots=1), open_session(bench)
    for name in ("a", "b"):
        await loaded(bench, name, name)
    assert not (await held(bench, other, "a", slot=True)).slot
    assert (await held(bench, session, "a", 1, slot=True)).slot
    assert not (await held(bench, session, "b", 2, slot=True)).slot
    for name in ("c", "d", "e"):
        await loaded(bench, name, name)
    assert bench.cache.residency.describe(ref("a")).slot is not None
    assert bench.cache.residency.describe(ref("b")).slot is None


async def test_a_hold_with_a_slot_loads_what_is_in_none() -> None:
    bench = make_bench(2)
    session = open_session(bench, reserved_slots=1)
    await loaded(bench, "a", "a", in_slot=False)
    assert bench.cache.residency.describe(ref("a")).slot is None
    assert (await held(bench, session, "a", slot=True)).slot
    assert bench.cache.residency.describe(ref("a")).slot is not None


async def test_a_load_with_a_hold_of_its_slot_may_use_the_reservation() -> None:
    bench = make_bench(2)
    session = open_session(bench, reserved_slots=2)
    with pytest.raises(SlotsExhausted):
        await loaded(bench, "a", "a")
    result = await loaded(bench, "a", "a", hold=hold_terms(session, 1, slot=True))
    assert result.hold.slot
    await loaded(bench, "b", "b", hold=hold_terms(session, 2, slot=True))
    with pytest.raises(SlotsExhausted):
        await loaded(bench, "c", "c", hold=hold_terms(session, 3, slot=True))
    bench.cache.check_integrity()


async def test_what_is_reserved_is_never_taken() -> None:
    """By pins, keeps, loads and other reservations; and the session that reserved it finds it."""
    bench = make_bench(3)
    for name in ("a", "b", "c"):
        await loaded(bench, name, name)
    session, other = open_session(bench, reserved_slots=2), open_session(bench)
    map_names(bench, other, "a")
    with pytest.raises(SlotsExhausted):
        map_names(bench, other, "a", "b")
    with pytest.raises(SlotsExhausted):
        map_names(bench, other, "b", mapping_id=1)
    with pytest.raises(SlotsExhausted):
        bench.cache.keep(ref("b"))
    with pytest.raises(SlotsExhausted):
        await loaded(bench, "d", "d")
    with pytest.raises(SlotsExhausted):
        open_session(bench, reserved_slots=1)
    assert len(bench.cache.sessions) == 2
    await loaded(bench, "d", "d", in_slot=False)
    for names in (("b", "c"), ("d", "b"), ("c", "d")):
        call = mapping_call(session, *names, load=True)
        (mapping,) = await finish(bench, asyncio.create_task(bench.cache.set_mapping(call)))
        assert mapping.digests == tuple(str(digest_of(name)) for name in names)
    bench.cache.close_session(session)
    map_names(bench, other, "a", "c")


async def test_what_two_share_is_not_taken_from_a_reservation_when_one_lets_go() -> None:
    bench = make_bench(2)
    for name in ("a", "b"):
        await loaded(bench, name, name)
    session, other = open_session(bench, reserved_slots=1), open_session(bench)
    map_names(bench, session, "a")
    map_names(bench, other, "a")
    with pytest.raises(SlotsExhausted):
        map_names(bench, other, "a", "b")
    bench.cache.release_mapping(session, 0)
    map_names(bench, session, "b")


async def test_a_replace_that_joins_a_load_protects_no_more_than_the_others_slots() -> None:
    """Its old version and the slot under way are two, of which only one is not reserved."""
    bench = make_bench(3)
    for name in ("a", "b"):
        await loaded(bench, name, name)
    open_session(bench, reserved_slots=2)
    loading = start_load(bench, "d", "d")
    await settle()
    bench.load_pool.run_one()
    await settle()
    bench.source.contents["/b"] = "d"
    joining = start_load(bench, "b", "d", replace=True)
    await settle()
    bench.load_pool.run_one(1)
    await settle()
    bench.cache.check_integrity()
    first, second = await finish(bench, loading, joining)
    assert first.resident.slot is not None
    assert isinstance(second, SlotsExhausted)
    assert bench.cache.residency.names.digest_of(ref("b")) == digest_of("b")


async def test_a_call_inside_its_reservation_waits_for_nobody() -> None:
    bench = make_bench(2)
    for name in ("a", "b"):
        await loaded(bench, name, name)
    session, other, third = open_session(bench, reserved_slots=1), open_session(bench), open_session(bench)
    map_names(bench, other, "a")
    call = mapping_call(third, "b", wait_seconds=60.0)
    waiting = asyncio.create_task(bench.cache.set_mapping(call))
    await settle()
    assert not waiting.done()
    assert map_names(bench, session, "b").digests == (str(digest_of("b")),)
    bench.cache.release_mapping(other, 0)
    (mapping,) = await finish(bench, waiting)
    assert mapping.digests == (str(digest_of("b")),)


async def test_keeps_and_reservations_together_are_no_more_than_the_slots() -> None:
    bench = make_bench(3)
    for name in ("a", "b"):
        await loaded(bench, name, name)
        bench.cache.keep(ref(name))
    with pytest.raises(SlotsExhausted):
        open_session(bench, reserved_slots=2)
    with pytest.raises(SlotsExhausted) as refusal:
        open_session(bench, reserved_slots=2)
    assert refusal.value.retry_after_seconds is None, "keeps do not go by themselves"
    open_session(bench, reserved_slots=1)
    bench.cache.release_keep(ref("b"))
    bench.cache.keep(ref("b"))
    with pytest.raises(SlotsExhausted) as refusal:
        open_session(bench, reserved_slots=4)
    assert refusal.value.retry_after_seconds is None


async def test_a_load_to_the_host_tier_takes_no_slot() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    before = bench.cache.layout
    result = await loaded(bench, "b", "b", in_slot=False)
    assert (result.resident.slot, result.already_resident) == (None, False)
    assert bench.cache.layout is before
    with pytest.raises(RequestInvalid):
        await loaded(bench, "c", "c", in_slot=False, keep=True)
    bench2 = make_bench(2, model=None)
    assert (await loaded(bench2, "a", "a", in_slot=False)).model is None


async def test_a_kept_name_does_not_move_out_of_its_slot() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1", keep=True)
    with pytest.raises(RequestInvalid):
        await loaded(bench, "a", "a2", in_slot=False, replace=True)
    assert bench.cache.residency.names.digest_of(ref("a")) == digest_of("a1")
    bench.cache.check_integrity()
