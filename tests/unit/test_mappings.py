"""Mappings that load, wait, idle, repeat for several ranks, or are withdrawn; step by step."""

from __future__ import annotations

import asyncio

import pytest
from slotcar_sidecar.core.errors import (
    AdapterNotFound,
    LayoutStale,
    ModelUnknown,
    RequestInvalid,
    SessionNotFound,
    SlotsExhausted,
    SourceUnavailable,
)
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import SessionId, SlotId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.mapping import Mapping

from tests.fakes.parts import IDLE_SECONDS, digest_of, make_bench, settle
from tests.fakes.steps import (
    bench_with,
    computed,
    finish,
    forward,
    loaded,
    map_names,
    mapped,
    open_session,
    pinned,
    read_by,
    ref,
    run_all,
    run_to_fills,
    start_load,
    start_map,
)

# With load


async def test_a_mapping_makes_its_whole_set_resident() -> None:
    bench = await bench_with(2, "a", "b", "c", "d")
    session = open_session(bench)
    mapping = await mapped(bench, session, "a", None, "b", "a", load=True)
    assert mapping.digests == (str(digest_of("a")), "", str(digest_of("b")), str(digest_of("a")))
    assert len(mapping.slots) == 2
    assert read_by(await computed(bench, session, mapping)) == list(mapping.digests)
    bench.cache.check_integrity()


async def test_nothing_changes_when_one_of_the_set_cannot_come() -> None:
    bench = await bench_with(2, "a", "b", "c", "d")
    bench.cache.tiers.host.drop(digest_of("a"))
    del bench.source.contents["/a"]
    session = open_session(bench)
    before = map_names(bench, session, "d")
    layout = bench.cache.layout
    with pytest.raises(SourceUnavailable):
        await mapped(bench, session, "b", "a", load=True)
    assert bench.cache.layout is layout
    assert pinned(bench, session) == before.slots
    assert read_by(await computed(bench, session, before)) == list(before.digests)


async def test_what_only_the_replaced_mapping_pins_counts_as_free() -> None:
    bench = await bench_with(2, "a", "b", "c")
    session = open_session(bench)
    map_names(bench, session, "b", "c")
    mapping = await mapped(bench, session, "a", "c", load=True)
    assert set(mapping.digests) == {str(digest_of("a")), str(digest_of("c"))}
    assert pinned(bench, session) == mapping.slots
    with pytest.raises(SlotsExhausted) as refusal:
        await mapped(bench, open_session(bench), "b", load=True)
    assert refusal.value.retry_after_seconds is not None


async def test_more_adapters_than_slots_can_never_be_had() -> None:
    bench = await bench_with(2, "a", "b", "c")
    session = open_session(bench)
    before = map_names(bench, session, "b")
    with pytest.raises(SlotsExhausted) as refusal:
        await mapped(bench, session, "a", "b", "c", load=True, wait_seconds=60.0)
    assert refusal.value.retry_after_seconds is None
    assert pinned(bench, session) == before.slots


async def test_a_mapping_joins_a_load_under_way() -> None:
    bench = await bench_with(2, "b")
    await loaded(bench, "alias", "a", in_slot=False)
    loading = start_load(bench, "a", "a")
    await settle()
    bench.load_pool.run_one()
    await settle()
    assert len(bench.cache.layout.in_state(SlotState.FILLING)) == 1
    mapping = start_map(bench, open_session(bench), "alias", load=True)
    results = await finish(bench, loading, mapping)
    assert results[1].digests == (str(digest_of("a")),)
    assert len(bench.cache.layout.in_state(SlotState.OCCUPIED)) == 2


@pytest.mark.parametrize("jobs", [0, 1])
async def test_a_load_whose_caller_goes_away_sets_no_mapping(jobs: int) -> None:
    """Nobody would know its generation, and nobody would release it. A fill that has begun goes on to its end."""
    bench = await bench_with(1, "a", "b")
    session = open_session(bench)
    task = start_map(bench, session, "a", load=True)
    await settle()
    for _ in range(jobs):
        bench.load_pool.run_one()
        await settle()
    task.cancel()
    await run_all(bench)
    assert bench.cache.residency.describe(ref("a" if jobs else "b")).slot == 0
    assert not bench.cache.sessions.get(session).mappings
    assert not bench.cache.residency.pins.pinned()
    bench.cache.check_integrity()


async def test_a_forced_unload_in_the_middle_of_the_load_is_adapter_not_found() -> None:
    bench = await bench_with(2, "a", "b", "c")
    session = open_session(bench)
    task = start_map(bench, session, "a", "c", load=True)
    await settle()
    bench.load_pool.run_one()
    await settle()
    assert bench.cache.layout.in_state(SlotState.FILLING)
    bench.cache.unload(ref("c"), force=True)
    (result,) = await finish(bench, task)
    assert isinstance(result, AdapterNotFound)
    assert not pinned(bench, session)
    bench.cache.check_integrity()


async def test_a_replace_in_the_middle_of_the_load_gives_the_version_of_the_end() -> None:
    bench = await bench_with(3, "a", "b", "c", "d")
    session = open_session(bench)
    task = start_map(bench, session, "a", "c", load=True)
    await settle()
    replacing = start_load(bench, "c", "c2", replace=True)
    (mapping, _) = await finish(bench, task, replacing)
    assert isinstance(mapping, Mapping)
    now = str(bench.cache.residency.names.digest_of(ref("c")))
    assert mapping.digests in {(str(digest_of("a")), now), (str(digest_of("a")), str(digest_of("c")))}
    assert read_by(await computed(bench, session, mapping)) == list(mapping.digests)


async def test_a_failed_fill_leaves_no_pin_and_no_claim() -> None:
    bench = await bench_with(1, "a", "b")
    session = open_session(bench)
    bench.device.fail_fill = RuntimeError("the device refused the write")
    (result,) = await finish(bench, start_map(bench, session, "a", load=True))
    assert isinstance(result, RuntimeError)
    bench.device.fail_fill = None
    assert not bench.cache.residency.pins.pinned()
    bench.cache.check_integrity()
    assert (await mapped(bench, session, "a", load=True)).digests == (str(digest_of("a")),)


async def test_a_session_that_ends_in_the_middle_of_the_load_leaves_nothing() -> None:
    bench = await bench_with(1, "a", "b")
    session = open_session(bench)
    task = start_map(bench, session, "a", load=True)
    await settle()
    bench.cache.close_session(session)
    (result,) = await finish(bench, task)
    assert isinstance(result, SessionNotFound)
    bench.cache.check_integrity()
    assert not bench.cache.residency.pins.pinned()


async def test_nothing_is_made_resident_before_the_model_is_known() -> None:
    bench = make_bench(1, model=None)
    await loaded(bench, "a", "a", in_slot=False)
    with pytest.raises(ModelUnknown):
        await mapped(bench, open_session(bench), "a", load=True)


async def test_a_fill_that_fails_leaves_the_slot_of_another_to_its_writer() -> None:
    """Of two fills one fails; the other's adapter is unloaded. Its slot is nobody's before its write has ended."""
    bench = await bench_with(2, "a", "b")
    for name in ("k", "l", "m"):
        await loaded(bench, name, name, in_slot=False)
    session = open_session(bench)
    task = start_map(bench, session, "k", "l", load=True)
    await run_to_fills(bench)
    bench.cache.unload(ref("l"), force=False)
    bench.device.fail_fill = RuntimeError("the device refused the write")
    bench.load_pool.run_one()
    bench.device.fail_fill = None
    await settle()
    assert len(bench.cache.layout.in_state(SlotState.FILLING)) == 1
    bench.cache.check_integrity()
    other = start_map(bench, session, "m", load=True, mapping_id=5)
    await run_to_fills(bench)
    results = await finish(bench, task, other)
    assert isinstance(results[0], RuntimeError)
    assert read_by(await computed(bench, session, results[1])) == [str(digest_of("m"))]
    assert not bench.device.written_twice
    assert not bench.cache.layout.in_state(SlotState.FILLING)
    assert bench.cache.layout.find(digest_of("l")) is None


async def test_a_call_without_effect_leaves_the_mapping_of_before_pinned() -> None:
    bench = await bench_with(2, "b", "a", "z")
    session = open_session(bench)
    before = map_names(bench, session, "a")
    task = start_map(bench, session, "b", load=True)
    await run_to_fills(bench)
    task.cancel()
    await run_all(bench)
    assert pinned(bench, session) == before.slots
    assert read_by(await computed(bench, session, before)) == list(before.digests)


async def test_a_mapping_of_before_lets_go_rather_than_break_a_reservation() -> None:
    bench = await bench_with(3, "d", "a", "b", "c")
    open_session(bench, reserved_slots=1)
    session = open_session(bench)
    map_names(bench, session, "a", "b")
    task = start_map(bench, session, "a", "d", load=True)
    await run_to_fills(bench)
    bench.cache.check_integrity()
    (mapping,) = await finish(bench, task)
    assert pinned(bench, session) == mapping.slots


async def test_a_load_for_a_session_that_is_gone_evicts_nobody() -> None:
    bench = await bench_with(1, "b", "a")
    session = open_session(bench)
    task = start_map(bench, session, "b", load=True)
    await settle()
    bench.cache.close_session(session)
    (result,) = await finish(bench, task)
    assert isinstance(result, SessionNotFound)
    assert bench.cache.layout.find(digest_of("a")) is not None


async def test_a_mapping_that_joins_a_load_protects_no_more_than_the_others_slots() -> None:
    bench = await bench_with(2, "b", "c", "a")
    one, two = open_session(bench, reserved_slots=1), open_session(bench)
    map_names(bench, two, "a", mapping_id=1)
    first = start_map(bench, one, "b", load=True)
    await run_to_fills(bench)
    second = start_map(bench, two, "b", load=True, mapping_id=2)
    await run_to_fills(bench)
    bench.cache.check_integrity()
    mapping, refusal = await finish(bench, first, second)
    assert mapping.digests == (str(digest_of("b")),)
    assert isinstance(refusal, SlotsExhausted)


# Idleness


async def test_an_idle_mapping_loses_its_pins_and_takes_them_again() -> None:
    bench = await bench_with(2, "a", "b")
    session = open_session(bench)
    mapping = map_names(bench, session, "a", None)
    bench.clock.now += IDLE_SECONDS
    bench.cache.expire()
    assert not pinned(bench, session)
    assert bench.seen[-1].kind is EventKind.EXPIRED
    assert read_by(await computed(bench, session, mapping)) == list(mapping.digests)
    assert pinned(bench, session) == mapping.slots


async def test_a_mapping_in_use_keeps_its_pins() -> None:
    bench = await bench_with(1, "a")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    for _ in range(4):
        bench.clock.now += IDLE_SECONDS / 2
        bench.cache.expire()
        await computed(bench, session, mapping)
    assert pinned(bench, session) == mapping.slots


async def test_an_idle_mapping_whose_slot_was_taken_is_stale() -> None:
    bench = await bench_with(1, "a")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    bench.clock.now += IDLE_SECONDS
    bench.cache.expire()
    await loaded(bench, "b", "b")
    with pytest.raises(LayoutStale):
        await computed(bench, session, mapping)
    assert not pinned(bench, session)


async def test_an_idle_mapping_of_a_name_that_is_gone_is_valid_until_its_slot_is_written() -> None:
    bench = await bench_with(1, "a")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    bench.cache.unload(ref("a"), force=False)
    bench.clock.now += IDLE_SECONDS
    bench.cache.expire()
    assert bench.cache.layout[SlotId(0)].state is SlotState.FREE
    assert read_by(await computed(bench, session, mapping)) == list(mapping.digests)
    assert not pinned(bench, session)
    bench.cache.check_integrity()
    await loaded(bench, "b", "b")
    with pytest.raises(LayoutStale):
        await computed(bench, session, mapping)


# Ranks


def by_digest(name: str, content: str) -> str:
    return f"{name}@{digest_of(content)}"


async def test_every_rank_is_given_the_same_answer() -> None:
    bench = await bench_with(2, "a", "b")
    session = open_session(bench, ranks=2)
    first = map_names(bench, session, by_digest("a", "a"))
    assert map_names(bench, session, by_digest("a", "a")) is first
    other = map_names(bench, session, by_digest("b", "b"))
    assert other.generation > first.generation
    with pytest.raises(RequestInvalid, match="2 ranks"):
        map_names(bench, session, "a")


async def test_ranks_that_straddle_a_replace_never_sum_two_versions() -> None:
    """Rank 0 has computed when the name moves, rank 1 has not: it computes with the same version, or is refused."""
    bench = await bench_with(2, "a")
    session = open_session(bench, ranks=2)
    old = by_digest("a", "a")
    mapping = map_names(bench, session, old)
    rank_0 = await computed(bench, session, mapping)
    await loaded(bench, "a", "a2", replace=True)
    again = map_names(bench, session, old)
    assert again is mapping
    rank_1 = await computed(bench, session, again, rank=1)
    assert rank_0.digests == rank_1.digests == (str(digest_of("a")),)
    assert read_by(rank_0) == read_by(rank_1)

    bench.cache.unload(ref("a"), force=False)
    newer = by_digest("a", "a2")
    with pytest.raises(AdapterNotFound):
        map_names(bench, session, newer)
    assert (await computed(bench, session, mapping, rank=1)).digests == rank_0.digests


async def test_a_rank_that_asks_after_a_change_gets_a_new_generation_and_the_other_is_stale() -> None:
    bench = await bench_with(2, "a", "b")
    session = open_session(bench, ranks=2)
    wanted = by_digest("a", "a")
    first = map_names(bench, session, wanted)
    bench.cache.unload(ref("a"), force=True)
    await loaded(bench, "c", "c")
    await loaded(bench, "a", "a")
    second = map_names(bench, session, wanted)
    assert second.generation > first.generation
    with pytest.raises(LayoutStale):
        await computed(bench, session, first)
    assert read_by(await computed(bench, session, second, rank=1)) == [str(digest_of("a"))]


async def test_a_rank_that_the_session_does_not_have_is_refused() -> None:
    bench = await bench_with(1, "a")
    session = open_session(bench, ranks=2)
    mapping = map_names(bench, session, by_digest("a", "a"))
    with pytest.raises(RequestInvalid, match="rank is 2"):
        await computed(bench, session, mapping, rank=2)
    with pytest.raises(RequestInvalid, match="rank is 2"):
        bench.cache.join_session(session, 2)


# Fence


async def test_a_fence_waits_for_what_came_before_and_for_nothing_else() -> None:
    bench = await bench_with(2, "a", "b")
    session, other = open_session(bench), open_session(bench)
    mapping, others = map_names(bench, session, "a"), map_names(bench, other, "b")
    running = forward(bench, session, mapping)
    forward(bench, other, others)
    await settle()
    running.cancel()
    fence = asyncio.get_running_loop().create_task(bench.cache.fence(session))
    await settle()
    assert not fence.done(), "the kernel runs on though its caller is gone"
    bench.compute_pool.run_one()
    await settle()
    assert fence.done()
    assert bench.compute_pool.jobs, "the other session's kernel is none of its business"
    await bench.cache.fence(session)
    bench.compute_pool.run_one()
    await settle()
    with pytest.raises(SessionNotFound):
        await bench.cache.fence(SessionId("nobody"))
