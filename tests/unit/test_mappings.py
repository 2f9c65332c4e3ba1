"""Mappings that load, wait, idle, repeat for several ranks, or are withdrawn; step by step."""

from __future__ import annotations

import asyncio

import pytest
from slotcar_sidecar.core.calls import MappingCall
from slotcar_sidecar.core.errors import (
    AdapterNotFound,
    CapacityExceeded,
    LayoutStale,
    MappingNotFound,
    ModelUnknown,
    RequestInvalid,
    SessionNotFound,
    ShuttingDown,
    SlotsExhausted,
    SourceUnavailable,
)
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import SessionId, SlotId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.pins import MappingOwner
from slotcar_sidecar.core.slots import Demand

from tests.fakes.parts import IDLE_SECONDS, Bench, digest_of, make_bench, settle
from tests.fakes.steps import (
    computed,
    finish,
    forward,
    loaded,
    map_names,
    mapped,
    open_session,
    read_by,
    ref,
    start_load,
    start_map,
)


async def bench_with(slots: int, *names: str) -> Bench:
    """A bench that knows all names, of which the last ones are in slots."""
    bench = make_bench(slots)
    for name in names:
        await loaded(bench, name, name)
    return bench


async def run_all(bench: Bench) -> None:
    """Everything goes on until all that is left waits for another step of the test."""
    await settle()
    while bench.load_pool.jobs:
        bench.load_pool.run_one()
        await settle()


def pinned(bench: Bench, session: SessionId, mapping_id: int = 0) -> frozenset[SlotId]:
    return bench.cache.residency.pins.by(MappingOwner(session, mapping_id))


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


# Waiting


async def test_two_engines_that_want_each_others_slots_both_make_progress_and_so_does_a_third() -> None:
    """Of four slots each has two and wants three, which nobody lets go by himself; a third engine asks for one."""
    bench = await bench_with(4, "e", "f", "g", "a", "b", "c", "d")
    one, two, three = (open_session(bench) for _ in range(3))
    map_names(bench, one, "a", "b")
    map_names(bench, two, "c", "d")
    calls = [(one, ("a", "b", "e")), (two, ("c", "d", "f")), (three, ("g",))]
    waiting = []
    for session, names in calls:
        waiting.append(start_map(bench, session, *names, load=True, wait_seconds=60.0))
        await settle()
    for (session, names), task in zip(calls, waiting, strict=True):
        (mapping,) = await finish(bench, task)
        assert mapping.digests == tuple(str(digest_of(name)) for name in names)
        assert read_by(await computed(bench, session, mapping)) == list(mapping.digests)
        map_names(bench, session, names[0])
    assert bench.cache.capacity().waiting == 0


async def test_two_sets_that_can_never_be_together_take_turns() -> None:
    bench = await bench_with(2, "a", "b", "c", "d")
    one, two, three = (open_session(bench) for _ in range(3))
    await mapped(bench, one, "a", load=True)
    await mapped(bench, two, "c", load=True)
    first = start_map(bench, one, "a", "b", load=True, wait_seconds=60.0)
    await settle()
    second = start_map(bench, two, "c", "d", load=True, wait_seconds=60.0)
    (mapping,) = await finish(bench, first)
    assert read_by(await computed(bench, one, mapping)) == list(mapping.digests)
    assert not second.done()
    (mapping,) = await finish(bench, start_map(bench, three, "a"))
    assert mapping.digests == (str(digest_of("a")),), "what others pin anyway costs nobody a slot"
    bench.cache.release_mapping(one, 0)
    bench.cache.release_mapping(three, 0)
    (mapping,) = await finish(bench, second)
    assert read_by(await computed(bench, two, mapping)) == list(mapping.digests)


async def test_calls_that_wait_are_served_in_their_order_and_before_newcomers() -> None:
    bench = await bench_with(2, "a", "b", "c", "d")
    holder = open_session(bench)
    map_names(bench, holder, "c", "d")
    sessions = [open_session(bench) for _ in range(3)]
    large = start_map(bench, sessions[0], "a", "b", load=True, wait_seconds=60.0)
    await settle()
    small = start_map(bench, sessions[1], "a", load=True, wait_seconds=60.0)
    await settle()
    map_names(bench, holder, "d")
    await run_all(bench)
    assert not large.done()
    assert not small.done(), "the one that waits longer needs both slots"
    for newcomer in (start_map(bench, sessions[2], "b", load=True), start_load(bench, "e", "e")):
        (refusal,) = await finish(bench, newcomer)
        assert isinstance(refusal, SlotsExhausted)
        assert refusal.retry_after_seconds is not None
    bench.cache.release_mapping(holder, 0)
    results = await finish(bench, large, small)
    assert [result.digests for result in results] == [
        (str(digest_of("a")), str(digest_of("b"))),
        (str(digest_of("a")),),
    ]


async def test_a_forward_of_a_mapping_that_is_being_replaced_does_not_pin_again() -> None:
    bench = await bench_with(2, "a", "b", "c")
    one, two = open_session(bench), open_session(bench)
    before = map_names(bench, one, "b")
    map_names(bench, two, "c")
    waiting = start_map(bench, one, "a", "b", load=True, wait_seconds=60.0)
    await settle()
    assert not waiting.done()
    assert not pinned(bench, one)
    assert read_by(await computed(bench, one, before)) == list(before.digests)
    assert not pinned(bench, one)
    bench.cache.release_mapping(two, 0)
    (mapping,) = await finish(bench, waiting)
    assert pinned(bench, one) == mapping.slots


async def test_a_call_waits_no_longer_than_it_said() -> None:
    bench = await bench_with(1, "a", "b")
    map_names(bench, open_session(bench), "b")
    waiting = start_map(bench, open_session(bench), "a", load=True, wait_seconds=5.0)
    await settle()
    bench.clock.now += 4.9
    bench.cache.expire()
    await settle()
    assert not waiting.done()
    bench.clock.now += 0.2
    bench.cache.expire()
    await settle()
    assert isinstance(waiting.exception(), SlotsExhausted)
    assert bench.cache.capacity().waiting == 0


async def test_a_caller_that_goes_away_gives_its_place_to_the_next() -> None:
    bench = await bench_with(2, "a", "b", "c")
    holder = open_session(bench)
    map_names(bench, holder, "b")
    first = start_map(bench, open_session(bench), "a", "c", load=True, wait_seconds=60.0)
    await settle()
    second = start_map(bench, open_session(bench), "a", load=True, wait_seconds=60.0)
    await settle()
    assert not second.done()
    first.cancel()
    (mapping,) = await finish(bench, second)
    assert mapping.digests == (str(digest_of("a")),)
    assert bench.cache.capacity().waiting == 0


async def test_a_call_whose_session_ends_or_whose_mapping_is_released_waits_no_longer() -> None:
    bench = await bench_with(1, "a", "b")
    map_names(bench, open_session(bench), "b")
    one, two = open_session(bench), open_session(bench)
    waiting = [start_map(bench, session, "a", load=True, wait_seconds=60.0) for session in (one, two)]
    await settle()
    bench.cache.close_session(one)
    bench.cache.release_mapping(two, 0)
    await settle()
    assert [type(task.exception()) for task in waiting] == [SessionNotFound, MappingNotFound]


async def test_a_later_mapping_of_the_same_id_is_not_undone_by_an_earlier_one_that_loads() -> None:
    """The caller gave up on the first; its load goes on and must not take the place of the second."""
    bench = await bench_with(2, "a", "b", "c")
    session = open_session(bench)
    first = start_map(bench, session, "a", load=True)
    await settle()
    second = map_names(bench, session, "c")
    (result,) = await finish(bench, first)
    assert isinstance(result, MappingNotFound)
    assert bench.cache.sessions.get(session).mapping(0) is second
    assert pinned(bench, session) == second.slots


async def test_a_refused_call_takes_nothing_from_one_of_its_mapping_that_waits() -> None:
    bench = await bench_with(2, "a", "b", "c")
    one, two = open_session(bench), open_session(bench)
    map_names(bench, two, "c")
    waiting = start_map(bench, one, "a", "b", load=True, wait_seconds=60.0)
    await settle()
    with pytest.raises(SlotsExhausted):
        map_names(bench, one, "b")
    bench.cache.release_mapping(two, 0)
    (mapping,) = await finish(bench, waiting)
    assert pinned(bench, one) == mapping.slots


async def test_a_call_that_waits_ends_when_its_mapping_is_set_otherwise() -> None:
    bench = await bench_with(2, "a", "b", "c")
    one, two = open_session(bench), open_session(bench)
    map_names(bench, two, "c")
    waiting = start_map(bench, one, "a", "b", load=True, wait_seconds=60.0)
    await settle()
    mapping = map_names(bench, one, "c")
    await settle()
    assert isinstance(waiting.exception(), MappingNotFound)
    assert pinned(bench, one) == mapping.slots
    assert bench.cache.capacity().waiting == 0


async def test_a_server_that_closes_ends_what_waits() -> None:
    bench = await bench_with(1, "a", "b")
    map_names(bench, open_session(bench), "b")
    waiting = start_map(bench, open_session(bench), "a", load=True, wait_seconds=60.0)
    await settle()
    bench.cache.close()
    await settle()
    assert isinstance(waiting.exception(), ShuttingDown)


async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotcar_sidecar.cache.mappings._MAX_WAITING", 1)
    bench = await bench_with(1, "a", "b")
    map_names(bench, open_session(bench), "b")
    tasks = [start_map(bench, open_session(bench), "a", load=True, wait_seconds=60.0) for _ in range(2)]
    await settle()
    assert not tasks[0].done()
    assert isinstance(tasks[1].exception(), CapacityExceeded)


@pytest.mark.parametrize("seconds", [-1.0, 3601.0, float("nan"), float("inf")])
def test_a_wait_beyond_its_bounds_is_refused(seconds: float) -> None:
    with pytest.raises(RequestInvalid):
        MappingCall(SessionId("s"), 0, (), wait_seconds=seconds)


async def test_who_joins_the_queue_wakes_nobody_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each of many that wait would make all others look again."""
    bench = await bench_with(1, "a", "b")
    map_names(bench, open_session(bench), "b")
    looks: list[SessionId] = []
    check = bench.cache.residency.slots.check

    def counted(demand: Demand) -> None:
        assert isinstance(demand.party, SessionId)
        looks.append(demand.party)
        check(demand)

    monkeypatch.setattr(bench.cache.residency.slots, "check", counted)
    sessions = [open_session(bench) for _ in range(20)]
    tasks = [start_map(bench, session, "a", load=True, wait_seconds=60.0) for session in sessions]
    await settle()
    assert bench.cache.capacity().waiting == len(tasks)
    assert [looks.count(session) for session in sessions[1:]] == [1] * (len(sessions) - 1)


async def test_a_call_that_waited_in_vain_leaves_the_mapping_pinned_as_it_was() -> None:
    bench = await bench_with(2, "a", "b", "c")
    one, two = open_session(bench), open_session(bench)
    before = map_names(bench, one, "b")
    map_names(bench, two, "c")
    waiting = start_map(bench, one, "a", "b", load=True, wait_seconds=5.0)
    await settle()
    assert not pinned(bench, one)
    bench.clock.now += 6.0
    bench.cache.expire()
    await settle()
    assert isinstance(waiting.exception(), SlotsExhausted)
    assert pinned(bench, one) == before.slots


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
