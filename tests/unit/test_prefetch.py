"""Prefetch over stand-ins whose every step is the test's: whom it takes from, whom it waits for, what it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from slotcar_sidecar.core.calls import LoadCall, MappingCall, PrefetchCall, Prefetched
from slotcar_sidecar.core.errors import CapacityExceeded, Reason, RequestInvalid, ShuttingDown
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.holds import HoldTerms
from slotcar_sidecar.core.ids import AdapterRef
from slotcar_sidecar.core.pins import HoldOwner
from slotcar_sidecar.core.policy import Eviction
from slotcar_sidecar.core.session import SessionTerms

from tests.fakes.disk import FakeFolder
from tests.fakes.parts import Bench, make_bench, settle

_MOST_STEPS = 50


def ref(name: str) -> AdapterRef:
    return AdapterRef.parse(name)


async def load(bench: Bench, name: str, *, in_slot: bool = True) -> None:
    bench.source.contents.setdefault(f"/{name}", name)
    work = asyncio.create_task(bench.cache.load(LoadCall(ref(name), f"/{name}", in_slot=in_slot)))
    await finished(bench, work)


async def finished(bench: Bench, work: asyncio.Task[Any]) -> Any:
    for _ in range(_MOST_STEPS):
        await settle()
        if work.done():
            return work.result()
        if bench.load_pool.jobs:
            bench.load_pool.run_one()
    raise AssertionError(f"{work} does not end")


def begin(bench: Bench, *names: str, in_slot: bool = True) -> asyncio.Task[tuple[Prefetched, ...]]:
    return asyncio.create_task(bench.cache.prefetch(PrefetchCall([ref(name) for name in names], in_slot=in_slot)))


async def prefetch(bench: Bench, *names: str, in_slot: bool = True) -> tuple[Prefetched, ...]:
    done: tuple[Prefetched, ...] = await finished(bench, begin(bench, *names, in_slot=in_slot))
    return done


def residents(bench: Bench) -> set[str]:
    return {str(each.name) for each in bench.cache.residency.describe_all() if each.slot is not None}


def reasons(ends: Sequence[Prefetched]) -> list[Reason | None]:
    return [end.refusal.reason if end.refusal else None for end in ends]


async def busy(names: str, *, eviction: Eviction = Eviction.LRU, **settings: Any) -> Bench:
    """Three slots with a, b and c, and `names` in memory."""
    bench = make_bench(3, fills_only=True, eviction=eviction, **settings)
    for name in "abc":
        await load(bench, name)
    for name in names:
        await load(bench, name, in_slot=False)
    return bench


async def test_what_was_used_since_the_call_came_stays() -> None:
    """By a mapping that is gone again, or by a Forward: whoever uses it will use it again."""
    bench = await busy("de")
    session = bench.cache.open_session(SessionTerms("engine"), None).session_id
    work = begin(bench, "d", "e")
    await settle()
    assert bench.cache.residency.layout.find(bench.cache.residency.names.digest_of(ref("d"))) == 0
    for name in "bc":
        await bench.cache.set_mapping(MappingCall(session, 1, Folded.of([ref(name)])))
    bench.cache.release_mapping(session, 1)
    ends = await finished(bench, work)
    assert reasons(ends) == [None, Reason.SLOTS_EXHAUSTED]
    assert residents(bench) == {"b", "c", "d"}


@pytest.mark.parametrize("eviction", Eviction)
async def test_what_it_brought_does_not_give_way_to_what_it_brings_next(eviction: Eviction) -> None:
    bench = await busy("defg", eviction=eviction)
    ends = await prefetch(bench, "d", "e", "f", "g")
    assert reasons(ends) == [None, None, None, Reason.SLOTS_EXHAUSTED]
    assert residents(bench) == {"d", "e", "f"}


async def test_what_is_resident_already_does_not_give_way_either() -> None:
    bench = await busy("d")
    ends = await prefetch(bench, "a", "b", "c", "d")
    assert reasons(ends) == [None, None, None, Reason.SLOTS_EXHAUSTED]
    assert residents(bench) == {"a", "b", "c"}
    assert not [event for event in bench.seen if event.kind is EventKind.EVICTED]


async def test_pins_keeps_and_reservations_stand() -> None:
    bench = await busy("de")
    bench.cache.keep(ref("a"))
    session = bench.cache.open_session(SessionTerms("engine"), None).session_id
    await bench.cache.set_mapping(MappingCall(session, 1, Folded.of([ref("b")])))
    bench.cache.open_session(SessionTerms("other", reserved_slots=1), None)
    ends = await prefetch(bench, "d", "e")
    assert reasons(ends) == [Reason.SLOTS_EXHAUSTED] * 2
    assert residents(bench) == {"a", "b", "c"}


async def test_a_call_that_waits_comes_first() -> None:
    bench = await busy("de")
    session = bench.cache.open_session(SessionTerms("engine"), None).session_id
    other = bench.cache.open_session(SessionTerms("other"), None).session_id
    await bench.cache.set_mapping(MappingCall(other, 1, Folded.of([ref("a"), ref("b")])))
    wanted = Folded.of([ref("c"), ref("d")])
    waits = asyncio.create_task(bench.cache.set_mapping(MappingCall(session, 1, wanted, load=True, wait_seconds=5.0)))
    await settle()
    assert reasons(await prefetch(bench, "e")) == [Reason.SLOTS_EXHAUSTED]
    bench.cache.release_mapping(other, 1)
    await finished(bench, waits)
    assert residents(bench) >= {"c", "d"}


async def test_in_memory_what_it_brought_does_not_give_way_either() -> None:
    """Adapters of one byte each; three fit."""
    bench = make_bench(1, host_bytes=3, fills_only=True)
    for name in "abcdefg":
        await load(bench, name, in_slot=False)
    assert {name for name in "abcdefg" if is_in_host(bench, name)} == set("efg")
    ends = await prefetch(bench, "a", "b", "c", "d", in_slot=False)
    assert reasons(ends) == [None, None, None, Reason.CAPACITY_EXCEEDED]
    assert {name for name in "abcdefg" if is_in_host(bench, name)} == set("abc")


def is_in_host(bench: Bench, name: str) -> bool:
    return bench.cache.residency.names.digest_of(ref(name)) in bench.cache.tiers.host


async def test_one_is_brought_at_a_time_for_one_call_after_the_other() -> None:
    bench = await busy("def")
    first, second = begin(bench, "d", "e"), begin(bench, "f")
    await settle()
    assert len(bench.load_pool.jobs) == 1
    bench.load_pool.run_one()
    await settle()
    assert len(bench.load_pool.jobs) == 1
    await finished(bench, first)
    assert reasons(await finished(bench, second)) == [None]
    assert residents(bench) == {"d", "e", "f"}


async def test_it_goes_on_when_its_caller_is_gone_and_so_many_may() -> None:
    bench = await busy("de")
    calls = [begin(bench, "d", "e") for _ in range(16)]
    await settle()
    with pytest.raises(CapacityExceeded):
        await bench.cache.prefetch(PrefetchCall([ref("d")]))
    for call in calls:
        call.cancel()
    await settle()
    while bench.load_pool.jobs:
        bench.load_pool.run_one()
        await settle()
    assert residents(bench) >= {"d", "e"}
    assert reasons(await prefetch(bench, "d")) == [None]


async def test_what_fails_on_its_way_is_said_and_the_others_go_on() -> None:
    bench = make_bench(3, host_bytes=1, fills_only=True)
    for name in "abc":
        await load(bench, name, in_slot=False)
    del bench.source.contents["/a"]
    bench.source.contents["/b"] = "other bytes"
    ends = await prefetch(bench, "nobody", "a", "b", "c")
    assert reasons(ends) == [
        Reason.ADAPTER_NOT_FOUND,
        Reason.SOURCE_UNAVAILABLE,
        Reason.DIGEST_MISMATCH,
        None,
    ]
    assert ends[0].resident is None
    assert residents(bench) == {"c"}
    bench.cache.check_integrity()
    assert bench.cache.capacity().host.held_bytes == 0


async def test_a_name_that_goes_on_the_way_leaves_nothing() -> None:
    bench = await busy("d")
    work = begin(bench, "d")
    await settle()
    bench.cache.unload(ref("d"), force=False)
    (end,) = await finished(bench, work)
    assert end.resident is None
    assert end.refusal is not None
    assert residents(bench) == {"b", "c"}
    assert bench.cache.capacity().available == 3
    bench.cache.check_integrity()


async def to_disk(bench: Bench, *names: str) -> tuple[Prefetched, ...]:
    call = PrefetchCall([ref(name) for name in names], in_slot=False, on_disk=True)
    done: tuple[Prefetched, ...] = await finished(bench, asyncio.create_task(bench.cache.prefetch(call)))
    return done


async def test_onto_the_disk_and_no_further() -> None:
    bench = make_bench(2, folder=FakeFolder(2), fills_only=True)
    for name in "ab":
        await load(bench, name, in_slot=False)
    tiers, digests = bench.cache.tiers, [bench.cache.residency.names.digest_of(ref(name)) for name in "ab"]
    for digest in digests:
        tiers.disk.forget(digest)
    tiers.host.drop(digests[0])
    ends = await finished(
        bench, asyncio.create_task(bench.cache.prefetch(PrefetchCall([ref("a"), ref("b")], False, True)))
    )
    assert reasons(ends) == [None, None]
    assert [digest in tiers.disk for digest in digests] == [True, True]
    assert [digest in tiers.host for digest in digests] == [False, True], "what was in memory stays there"


async def test_what_the_disk_does_not_take_stays_in_memory() -> None:
    folder = FakeFolder(8)
    bench = make_bench(2, folder=folder, fills_only=True)
    folder.is_full = True
    await load(bench, "a", in_slot=False)
    ends = await to_disk(bench, "a")
    assert reasons(ends) == [Reason.CAPACITY_EXCEEDED]
    assert is_in_host(bench, "a")


async def test_a_load_onto_the_disk_leaves_nothing_in_memory_but_what_is_held() -> None:
    bench = make_bench(2, folder=FakeFolder(8), fills_only=True)
    bench.source.contents |= {"/a": "a", "/b": "b"}
    session = bench.cache.open_session(SessionTerms("engine"), None).session_id
    hold = HoldTerms(HoldOwner(session, 1), None, slot=False)
    for name, terms in (("a", None), ("b", hold)):
        call = LoadCall(ref(name), f"/{name}", in_slot=False, on_disk=True, hold=terms)
        await finished(bench, asyncio.create_task(bench.cache.load(call)))
    assert [is_in_host(bench, name) for name in "ab"] == [False, True]
    assert all(bench.cache.residency.names.digest_of(ref(name)) in bench.cache.tiers.disk for name in "ab")
    assert reasons(await prefetch(bench, "a", "b")) == [None, None]
    assert bench.source.reads == ["/a", "/b"], "from the disk, not from the source again"


async def test_without_a_disk_nothing_can_stop_there() -> None:
    bench = await busy("d")
    with pytest.raises(RequestInvalid) as refusal:
        await to_disk(bench, "d")
    assert refusal.value.field == "target_tier"
    with pytest.raises(RequestInvalid) as refusal:
        await bench.cache.load(LoadCall(ref("d"), in_slot=False, on_disk=True))
    assert refusal.value.field == "target_tier"


async def test_without_a_model_it_stops_in_memory() -> None:
    bench = make_bench(3, model=None, fills_only=True)
    await load(bench, "a", in_slot=False)
    ends = await prefetch(bench, "a")
    assert reasons(ends) == [Reason.MODEL_UNKNOWN]
    assert reasons(await prefetch(bench, "a", in_slot=False)) == [None]


async def test_a_server_that_shuts_down_begins_no_more() -> None:
    bench = await busy("de")
    work = begin(bench, "d", "e")
    await settle()
    bench.cache.shut_down()
    assert reasons(await finished(bench, work)) == [None, Reason.SHUTTING_DOWN]
    with pytest.raises(ShuttingDown):
        await bench.cache.prefetch(PrefetchCall([ref("d")]))
