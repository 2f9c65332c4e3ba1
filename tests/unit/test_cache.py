"""The cache, step by step: loads, their sources and their bounds."""

from __future__ import annotations

import asyncio

import pytest
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    CapacityExceeded,
    DigestMismatch,
    ModelUnknown,
    SlotsExhausted,
    SourceUnavailable,
)
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import Digest, SlotId
from slotcar_sidecar.core.layout import SlotState

from tests.fakes.parts import (
    MODEL,
    Weights,
    digest_of,
    make_bench,
    settle,
    weights_of,
)
from tests.fakes.steps import (
    finish,
    loaded,
    map_names,
    open_session,
    ref,
    run_all,
    start_load,
)


async def test_a_load_is_visible_last() -> None:
    bench = make_bench(2)
    task = start_load(bench, "a", "a1")
    await settle()
    bench.load_pool.run_one()
    await settle()
    assert bench.cache.layout[SlotId(0)].state is SlotState.FILLING
    assert len(bench.cache.residency.names) == 0
    (result,) = await finish(bench, task)
    assert result.resident.slot == 0
    assert not result.already_resident
    assert bench.cache.layout[SlotId(0)].state is SlotState.OCCUPIED


async def test_loads_of_the_same_bytes_share_a_fill() -> None:
    bench = make_bench(3)
    bench.source.contents |= {"/a": "same", "/b": "same"}
    results = await finish(
        bench, start_load(bench, "a", "same"), start_load(bench, "a", "same"), start_load(bench, "b", "same")
    )
    assert [result.resident.slot for result in results] == [0, 0, 0]
    assert len(bench.cache.layout.in_state(SlotState.OCCUPIED)) == 1
    assert (await loaded(bench, "a", "same")).already_resident


async def test_a_load_outlives_its_caller() -> None:
    bench = make_bench(2)
    task = start_load(bench, "a", "a1")
    await settle()
    task.cancel()
    await settle()
    while bench.load_pool.jobs:
        bench.load_pool.run_one()
        await settle()
    assert bench.cache.residency.describe(ref("a")).slot == 0
    bench.cache.check_integrity()


async def test_new_bytes_at_an_old_source_are_read_anew() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "old")
    with pytest.raises(AdapterConflict):
        await loaded(bench, "a", "new")
    result = await loaded(bench, "a", "new", replace=True)
    assert result.resident.adapter.digest == digest_of("new")


async def test_a_digest_that_is_asked_for_is_checked() -> None:
    bench = make_bench(2)
    with pytest.raises(DigestMismatch) as refusal:
        await loaded(bench, f"a@{digest_of('wanted')}", "found")
    assert refusal.value.facts["found"] == str(digest_of("found"))
    assert bench.cache.layout.in_state(SlotState.FREE) == (0, 1)


async def test_an_evicted_adapter_comes_back_from_host_and_from_its_source() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    await loaded(bench, "b", "b1")
    reads = len(bench.source.reads)
    await loaded(bench, "a")
    assert len(bench.source.reads) == reads
    bench.cache.tiers.host.drop(digest_of("b1"))
    await loaded(bench, "b")
    assert bench.source.reads[reads:] == ["/b"]


async def test_an_adapter_whose_source_changed_does_not_come_back_as_another() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    await loaded(bench, "b", "b1")
    bench.cache.tiers.host.drop(digest_of("a1"))
    bench.source.contents["/a"] = "a2"
    with pytest.raises(DigestMismatch):
        await loaded(bench, "a")


async def test_a_load_that_finds_every_slot_pinned_changes_nothing() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    map_names(bench, open_session(bench), "a")
    before = bench.cache.layout
    with pytest.raises(SlotsExhausted) as refusal:
        await loaded(bench, "b", "b1")
    assert refusal.value.retry_after_seconds is not None
    assert refusal.value.facts == {"slots": "1", "pinned": "1", "kept": "0", "loading": "0", "reserved": "0"}
    assert bench.cache.layout == before
    with pytest.raises(AdapterNotFound):
        bench.cache.residency.names.digest_of(ref("b"))


async def test_a_fill_that_fails_frees_its_slot_and_tells_every_caller() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    tasks = [start_load(bench, "b", "b1"), start_load(bench, "b", "b1")]
    await settle()
    bench.load_pool.run_one()
    await settle()
    bench.load_pool.run_one()
    await settle()
    bench.device.fail_fill = RuntimeError("broken")
    results = await finish(bench, *tasks)
    assert [str(result) for result in results] == ["broken", "broken"]
    assert bench.cache.layout.in_state(SlotState.FREE) == (0,)
    bench.device.fail_fill = None
    assert (await loaded(bench, "b", "b1")).resident.slot == 0
    bench.cache.check_integrity()


async def test_bytes_that_were_filled_but_not_named_yet_are_no_victim() -> None:
    """Two loads whose jobs end in the same turn of the loop: the second may not evict what the first will name."""
    bench = make_bench(1)
    first = start_load(bench, "a", "a1")
    await settle()
    bench.load_pool.run_one()
    await settle()
    second = start_load(bench, "b", "b1")
    await settle()
    assert len(bench.load_pool.jobs) == 2  # the fill of a, and the check of b
    bench.load_pool.run_one()
    bench.load_pool.run_one()
    one, two = await finish(bench, first, second)
    assert one.resident.slot == 0
    assert isinstance(two, SlotsExhausted)


async def test_nothing_loads_before_the_model_is_known_but_the_bytes_stay_in_host() -> None:
    bench = make_bench(1, model=None)
    with pytest.raises(ModelUnknown):
        await loaded(bench, "a", "a1")
    assert digest_of("a1") in bench.cache.tiers.host
    bench.cache.adopt_model(MODEL)
    assert (await loaded(bench, "a", "a1")).resident.slot == 0


async def test_an_adapter_larger_than_the_host_tier_is_refused_before_anything_is_evicted() -> None:
    bench = make_bench(1, host_bytes=0)
    before = bench.cache.layout
    with pytest.raises(CapacityExceeded):
        await loaded(bench, "a", "a1")
    assert bench.cache.layout == before


async def test_a_refused_load_is_an_event() -> None:
    bench = make_bench(1)
    bench.source.contents.clear()
    task = asyncio.create_task(bench.cache.load(LoadCall(ref("a"), "/nowhere")))
    with pytest.raises(SourceUnavailable):
        await task
    assert bench.seen[-1].kind is EventKind.REFUSED
    assert "SOURCE_UNAVAILABLE" in bench.seen[-1].reason


async def test_an_estimate_says_why_not_and_has_no_effect() -> None:
    bench = make_bench(1, host_bytes=0)
    bench.source.contents["/a"] = "a1"
    task = asyncio.create_task(bench.cache.estimate("/a"))
    (estimate,) = await finish(bench, task)
    assert isinstance(estimate.refusal, CapacityExceeded)
    assert estimate.device_bytes == 8
    assert digest_of("a1") not in bench.cache.tiers.host
    assert bench.cache.layout.generation == 1
    assert weights_of("a1").adapter.digest == estimate.adapter.digest


async def test_each_name_comes_back_from_its_own_source() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "same")
    await loaded(bench, "b", "same")
    del bench.source.contents["/b"]
    await loaded(bench, "c", "c1")
    bench.cache.tiers.host.drop(digest_of("same"))
    assert bench.cache.residency.describe(ref("a")).source == "/a"
    assert (await loaded(bench, "a")).resident.slot == 0
    await loaded(bench, "c")
    bench.cache.tiers.host.drop(digest_of("same"))
    with pytest.raises(SourceUnavailable):
        await loaded(bench, "b")


async def test_loads_beyond_a_few_wait_before_they_read() -> None:
    bench = make_bench(8)
    names = "abcdefgh"
    tasks = [start_load(bench, name, f"{name}1") for name in names]
    await settle()
    assert len(bench.source.reads) == 4
    await finish(bench, *tasks)
    assert len(bench.source.reads) == len(names)


async def test_names_are_bounded() -> None:
    bench = make_bench(2)
    for number in range(8):
        await loaded(bench, f"n{number}", "same")
    with pytest.raises(CapacityExceeded):
        await loaded(bench, "more", "same")
    await loaded(bench, "n0", "other", replace=True)


async def test_a_pinned_digest_can_be_looked_up_after_its_name_has_moved() -> None:
    bench = make_bench(3)
    await loaded(bench, "a", "a1")
    await loaded(bench, "alias", "a1")
    session = open_session(bench)
    map_names(bench, session, "a")
    await loaded(bench, "a", "a2", replace=True)
    assert bench.cache.residency.describe(ref(f"a@{digest_of('a1')}")).adapter.digest == digest_of("a1")


class Sent:
    """An upload that has come whole."""

    def __init__(self, content: str) -> None:
        self.content = content

    def add_config(self, chunk: bytes) -> None: ...

    def add_weights(self, chunk: bytes) -> None: ...

    def finish(self, wanted: Digest | None) -> Weights:
        return weights_of(self.content, source="")


async def test_an_uploaded_name_comes_back_from_the_source_of_another_with_its_bytes() -> None:
    bench = make_bench(1, host_bytes=1)
    await finish(bench, asyncio.create_task(bench.cache.load(LoadCall(ref("up"), upload=Sent("same")))))
    await loaded(bench, "source", "same")
    await loaded(bench, "other", "other")
    assert digest_of("same") not in bench.cache.tiers.host
    assert (await loaded(bench, "up")).resident.adapter.digest == digest_of("same")


async def test_a_digest_is_not_known_by_all_the_names_it_ever_had() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a")
    for number in range(20):
        await loaded(bench, f"n{number}", "a")
        bench.cache.unload(ref(f"n{number}"), force=False)
    known = [n for n in range(20) if bench.cache.residency.names.was_known_as(ref(f"n{n}@{digest_of('a')}"))]
    assert not known


async def test_a_change_is_seen_by_whoever_waited_before_it() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    seen = asyncio.create_task(bench.cache.wait_for_change(60.0))
    await asyncio.sleep(0)
    bench.cache.unload(ref("a"), force=False)
    assert await seen


async def test_uploads_are_bounded_until_their_loads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(1)
    monkeypatch.setattr(bench.cache.tiers, "begin_upload", lambda *sizes: Sent("a"))
    for _ in range(4):
        with bench.cache.upload(1, 1) as upload:
            task = asyncio.create_task(bench.cache.load(LoadCall(ref("a"), upload=upload)))
            await settle()
            task.cancel()
            await settle()
    with pytest.raises(CapacityExceeded), bench.cache.upload(1, 1):
        pass
    await run_all(bench)
    with bench.cache.upload(1, 1):
        pass


async def test_loads_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotcar_sidecar.cache.loads._MAX_UNDER_WAY", 2)
    bench = make_bench(1)
    tasks = [start_load(bench, "a", "a") for _ in range(3)]
    results = await finish(bench, *tasks)
    assert [isinstance(result, CapacityExceeded) for result in results] == [False, False, True]
    await loaded(bench, "a", "a")
