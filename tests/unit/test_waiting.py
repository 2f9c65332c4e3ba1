"""SetMapping calls that wait for slots: in their order, holding nothing, and never for nothing; step by step."""

from __future__ import annotations

import pytest
from slotcar_sidecar.core.calls import MappingCall
from slotcar_sidecar.core.errors import (
    AdapterNotFound,
    CapacityExceeded,
    MappingNotFound,
    RequestInvalid,
    SessionNotFound,
    ShuttingDown,
    SlotsExhausted,
)
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.slots import Demand

from tests.fakes.parts import digest_of, settle
from tests.fakes.steps import (
    bench_with,
    computed,
    finish,
    loaded,
    map_names,
    mapped,
    open_session,
    pinned,
    read_by,
    ref,
    run_all,
    run_to_fills,
    start_hold,
    start_load,
    start_map,
)


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


async def test_each_session_has_its_bounded_part_of_the_queue() -> None:
    bench = await bench_with(1, "a", "b")
    map_names(bench, open_session(bench), "b")
    greedy, other = open_session(bench), open_session(bench)
    most = bench.cache.sessions.max_mappings
    tasks = [start_map(bench, greedy, "a", load=True, wait_seconds=60.0, mapping_id=n) for n in range(most + 1)]
    await settle()
    assert [task.done() for task in tasks] == [False] * most + [True]
    assert isinstance(tasks[-1].exception(), CapacityExceeded)
    waiting = start_map(bench, other, "a", load=True, wait_seconds=60.0)
    await settle()
    assert not waiting.done()


async def test_a_call_inside_its_reservation_is_woken_though_it_is_not_first() -> None:
    bench = await bench_with(3, "a1", "a2", "a3", "x", "y")
    one, two, three = open_session(bench, reserved_slots=2), open_session(bench), open_session(bench)
    await mapped(bench, two, "x", load=True)
    await mapped(bench, one, "a1", load=True)
    first = start_map(bench, three, "y", load=True, wait_seconds=60.0)
    await run_all(bench)
    second = start_map(bench, one, "a2", "a3", load=True, wait_seconds=60.0, mapping_id=1)
    await run_all(bench)
    assert not second.done()
    bench.cache.release_mapping(one, 0)
    await run_all(bench)
    assert second.result().digests == (str(digest_of("a2")), str(digest_of("a3")))
    assert not first.done()


async def test_an_old_version_stays_known_to_the_session_whose_call_waits_for_it() -> None:
    """What an engine does after a replace: the batch goes on with the old version, and a new request joins it."""
    bench = await bench_with(3, "other", "sql")
    session, holder = open_session(bench), open_session(bench)
    before = map_names(bench, session, "sql")
    old = str(before.refs[0])
    await loaded(bench, "sql", "sql v2", replace=True)
    map_names(bench, holder, "other", "sql")
    await loaded(bench, "fresh", "fresh", in_slot=False)
    waiting = start_map(bench, session, old, "fresh", load=True, wait_seconds=60.0)
    await run_all(bench)
    assert not waiting.done()
    bench.cache.release_mapping(holder, 0)
    (mapping,) = await finish(bench, waiting)
    assert mapping.digests[0] == before.digests[0]
    assert read_by(await computed(bench, session, mapping)) == list(mapping.digests)


async def test_force_ends_what_a_call_waits_for() -> None:
    bench = await bench_with(2, "other", "sql")
    session, holder = open_session(bench), open_session(bench)
    old = str(map_names(bench, session, "sql").refs[0])
    map_names(bench, holder, "other")
    waiting = start_map(bench, session, old, "fresh", load=True, wait_seconds=60.0)
    await run_all(bench)
    assert isinstance(waiting.exception(), AdapterNotFound)
    await loaded(bench, "fresh", "fresh", in_slot=False)
    map_names(bench, session, "sql")
    waiting = start_map(bench, session, old, "fresh", load=True, wait_seconds=60.0)
    await run_all(bench)
    assert not waiting.done()
    bench.cache.unload(ref("sql"), force=True)
    await run_all(bench)
    assert isinstance(waiting.exception(), AdapterNotFound)


async def test_what_came_back_after_force_is_in_the_room_of_who_brought_it() -> None:
    """A call fills one slot of three when another of its adapters is unloaded by force, loaded anew, and held."""
    bench = await bench_with(3, "d", "x", "a", "c")
    session = open_session(bench)
    task = start_map(bench, session, "a", "c", "d", load=True, wait_seconds=60.0)
    await settle()
    await run_to_fills(bench)
    bench.cache.unload(ref("a"), force=True)
    owner = open_session(bench, reserved_slots=1)
    start_load(bench, "a", "a", in_slot=False)
    await run_to_fills(bench)
    held = start_hold(bench, owner, "a", slot=True)
    await run_to_fills(bench)
    assert len(bench.cache.layout.in_state(SlotState.FILLING)) == 2
    bench.cache.check_integrity()
    bench.load_pool.run_one(1)
    await settle()
    assert held.result().slot
    bench.cache.release_hold(owner, 1)
    bench.cache.check_integrity()
    await run_all(bench)
    assert isinstance(task.exception(), SlotsExhausted), "two slots are left to it, and it wants three"
    bench.cache.check_integrity()


async def test_of_two_calls_for_one_mapping_the_later_one_stands() -> None:
    bench = await bench_with(1, "c", "b", "a")
    holder, session = open_session(bench), open_session(bench)
    map_names(bench, holder, "a")
    first = start_map(bench, session, "b", load=True, wait_seconds=60.0)
    await settle()
    second = start_map(bench, session, "c", load=True, wait_seconds=60.0)
    await settle()
    bench.cache.release_mapping(holder, 0)
    earlier, later = await finish(bench, first, second)
    assert earlier.digests == (str(digest_of("b")),)
    assert later.digests == (str(digest_of("c")),)
    assert bench.cache.sessions.get(session).mapping(0) is later


async def test_no_keep_and_no_reservation_overtakes_a_call_that_waits() -> None:
    bench = await bench_with(3, "x", "y", "a", "b", "c")
    holder, session = open_session(bench), open_session(bench)
    map_names(bench, holder, "a", "b")
    waiting = start_map(bench, session, "x", "y", load=True, wait_seconds=60.0)
    await settle()
    for overtake in (lambda: bench.cache.keep(ref("c")), lambda: open_session(bench, reserved_slots=1)):
        with pytest.raises(SlotsExhausted) as refusal:
            overtake()
        assert refusal.value.retry_after_seconds is not None
    bench.cache.keep(ref("a"))
    bench.cache.release_mapping(holder, 0)
    (mapping,) = await finish(bench, waiting)
    assert len(mapping.slots) == 2


async def test_a_call_that_comes_when_the_server_is_closed_does_not_wait() -> None:
    bench = await bench_with(1, "b", "a")
    map_names(bench, open_session(bench), "a")
    session = open_session(bench)
    bench.cache.close()
    waiting = start_map(bench, session, "b", load=True, wait_seconds=60.0)
    await settle()
    assert isinstance(waiting.exception(), ShuttingDown)


@pytest.mark.parametrize("seconds", [-1.0, 3601.0, float("nan"), float("inf")])
def test_a_wait_beyond_its_bounds_is_refused(seconds: float) -> None:
    with pytest.raises(RequestInvalid):
        MappingCall(SessionId("s"), 0, Folded.of(()), wait_seconds=seconds)


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
