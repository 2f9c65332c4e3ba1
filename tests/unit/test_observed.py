"""What the cache tells its observer: loads and look-ups, evictions and thrash, recoveries, waits and Forwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from slotcar_sidecar.core.calls import ForwardCall, LoadCall, MappingCall, PrefetchCall
from slotcar_sidecar.core.errors import LayoutStale, SlotsExhausted, SourceUnavailable
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import AdapterRef, SessionId
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.session import SessionTerms
from slotcar_sidecar.core.tally import NO_WORK, Work
from slotcar_sidecar.core.thrash import THRASH_SECONDS

from tests.fakes.parts import SITE, Bench, SilentObserver, make_bench, settle, vector


class Observer(SilentObserver):
    """Remembers."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()
        self.waits: list[float] = []
        self.forwards: list[tuple[Any, ...]] = []

    def loaded(self, reason: str) -> None:
        self.told[f"loaded {reason}"] += 1

    def looked_up(self, tier: str, hits: int, misses: int) -> None:
        self.told[f"{tier} hit"] += hits
        self.told[f"{tier} miss"] += misses

    def evicted(self, tier: str, reason: str) -> None:
        self.told[f"evicted {tier} {reason}"] += 1

    def thrashed(self) -> None:
        self.told["thrashed"] += 1

    def recovered(self) -> None:
        self.told["recovered"] += 1

    def mapping_waited(self, seconds: float) -> None:
        self.waits.append(seconds)

    def forward(self, plane: str, seconds: float, reason: str, work: Work, queue_seconds: float) -> None:
        self.forwards.append((plane, seconds, reason, work, queue_seconds))

    def new(self) -> dict[str, int]:
        """What was told since the last time, without what is 0."""
        told, self.told = +self.told, Counter()
        return dict(told)


def start(slots: int, *, host_bytes: int = 1 << 20) -> tuple[Bench, Observer, SessionId]:
    """A cache with an observer, whose loads go on by themselves, five adapters, and a session."""
    bench, observer = make_bench(slots, host_bytes=host_bytes, fills_only=True), Observer()
    state, tiers = bench.cache._state, bench.cache.tiers
    state.environment = bench.cache.environment = replace(bench.cache.environment, observer=observer)
    vars(tiers)["_environment"] = replace(vars(tiers)["_environment"], observer=observer)
    for name in "abcde":
        bench.source.contents[f"/{name}"] = name
    return bench, observer, bench.cache.open_session(SessionTerms("engine"), None).session_id


async def done(bench: Bench, work: Any) -> Any:
    """The result, once every job of loads has run."""
    task = asyncio.ensure_future(work)
    await settle()
    while bench.load_pool.jobs:
        bench.load_pool.run_one()
        await settle()
    return await task


async def load(bench: Bench, name: str, *, in_slot: bool = True) -> None:
    await done(bench, bench.cache.load(LoadCall(AdapterRef.parse(name), f"/{name}", in_slot=in_slot)))


def wish(session: SessionId, *names: str | None, mapping_id: int = 1, wait_seconds: float = 0.0) -> MappingCall:
    refs = Folded.of([AdapterRef.parse(name) if name else None for name in names])
    return MappingCall(session, mapping_id, refs, load=True, wait_seconds=wait_seconds)


async def test_a_load_is_looked_up_and_counted_by_its_end() -> None:
    bench, observer, _ = start(2)
    await load(bench, "a")
    assert observer.new() == {"loaded OK": 1, "device miss": 1}
    await load(bench, "a")
    assert observer.new() == {"loaded OK": 1, "device hit": 1}
    with pytest.raises(SourceUnavailable):
        await load(bench, "nowhere")
    assert observer.new() == {"loaded SOURCE_UNAVAILABLE": 1}


async def test_evictions_have_the_reason_of_who_took_the_slot() -> None:
    bench, observer, session = start(1)
    for name in "abc":
        await load(bench, name, in_slot=False)
    observer.new()
    await load(bench, "a")
    await load(bench, "b")
    assert observer.new()["evicted device load"] == 1
    await done(bench, bench.cache.set_mapping(wish(session, "c")))
    assert observer.new()["evicted device mapping"] == 1
    bench.cache.release_mapping(session, 1)
    await done(bench, bench.cache.prefetch(PrefetchCall([AdapterRef.parse("a")])))
    assert observer.new()["evicted device prefetch"] == 1


async def test_memory_that_gives_way_is_an_eviction() -> None:
    bench, observer, _ = start(1)
    await load(bench, "a", in_slot=False)
    bench.cache.tiers.host.capacity_bytes = bench.cache.tiers.host.used_bytes
    await load(bench, "b", in_slot=False)
    assert observer.new()["evicted host capacity"] == 1


async def test_what_comes_back_within_a_minute_is_thrash() -> None:
    bench, observer, session = start(1)
    for name in "ab":
        await load(bench, name)
    await done(bench, bench.cache.set_mapping(wish(session, "a")))
    assert observer.new()["thrashed"] == 1
    bench.clock.now += THRASH_SECONDS + 1
    await done(bench, bench.cache.set_mapping(wish(session, "b")))
    assert "thrashed" not in observer.new()


async def test_each_adapter_of_a_mapping_is_looked_up_once() -> None:
    bench, observer, session = start(3)
    await load(bench, "a")
    await load(bench, "b", in_slot=False)
    observer.new()
    await done(bench, bench.cache.set_mapping(wish(session, "a", "b", None, "a", "b")))
    assert observer.new() == {"device hit": 1, "device miss": 1, "host hit": 1, "loaded OK": 1}


async def stale(bench: Bench, session: SessionId) -> Mapping:
    """A mapping of "a" whose slot was freed by force, and filled again with the same bytes."""
    await load(bench, "a")
    mapping = await bench.cache.set_mapping(wish(session, "a"))
    bench.cache.unload(AdapterRef.parse("a"), force=True)
    await load(bench, "a")
    return mapping


async def test_a_stale_mapping_that_is_set_again_by_its_digest_is_a_recovery() -> None:
    bench, observer, session = start(2)
    mapping = await stale(bench, session)
    (ref,) = mapping.refs
    await bench.cache.set_mapping(wish(session, str(ref)))
    assert observer.new()["recovered"] == 1
    await bench.cache.set_mapping(wish(session, str(ref)))
    assert "recovered" not in observer.new()


async def test_another_wish_is_no_recovery() -> None:
    bench, observer, session = start(2)
    await stale(bench, session)
    await bench.cache.set_mapping(wish(session, "a"))
    await bench.cache.set_mapping(wish(session, None))
    assert "recovered" not in observer.new()


async def test_waiting_is_timed_whether_it_is_served_or_not() -> None:
    bench, observer, session = start(1)
    await load(bench, "a")
    await load(bench, "b", in_slot=False)
    holder = bench.cache.open_session(SessionTerms("holder"), None).session_id
    await bench.cache.set_mapping(wish(holder, "a"))
    waiting = asyncio.create_task(bench.cache.set_mapping(wish(session, "b", wait_seconds=5)))
    await settle()
    assert {str(name) for name in bench.cache.awaited()} == {"b"}
    bench.clock.now += 5
    bench.cache.expire()
    with pytest.raises(SlotsExhausted):
        await waiting
    assert observer.waits == [5.0]
    assert bench.cache.awaited() == frozenset()


async def test_who_is_written_into_a_slot_is_awaited() -> None:
    bench, _, _ = start(1)
    loading = asyncio.create_task(bench.cache.load(LoadCall(AdapterRef.parse("a"), "/a")))
    await settle()
    assert {str(name) for name in bench.cache.awaited()} == {"a"}
    await done(bench, loading)
    assert bench.cache.awaited() == frozenset()


async def test_a_forward_tells_its_work_and_how_long_it_queued() -> None:
    bench, observer, session = start(1)
    await load(bench, "a")
    mapping = await bench.cache.set_mapping(wish(session, "a"))
    call = ForwardCall(session, 1, mapping.generation, [2], [ForwardItem(SITE, vector(2))], "unary")
    computing = asyncio.create_task(bench.cache.forward(call))
    await settle()
    bench.clock.now += 3
    bench.compute_pool.run_one()
    computed = await computing
    assert computed.queue_seconds == 3.0
    assert observer.forwards == [("unary", 3.0, "OK", Work(rows=2, in_bytes=8, out_bytes=8), 3.0)]
    with pytest.raises(LayoutStale):
        await bench.cache.forward(replace(call, generation=mapping.generation + 1))
    assert observer.forwards[1:] == [("unary", 0.0, "LAYOUT_STALE", NO_WORK, 0.0)]
