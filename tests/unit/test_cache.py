"""The cache, step by step: kernels, fills and callers take their turns as the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    AdapterNotResident,
    CapacityExceeded,
    DigestMismatch,
    LayoutStale,
    MappingNotFound,
    ModelUnknown,
    RequestInvalid,
    SessionNotFound,
    ShapeMismatch,
    ShuttingDown,
    SiteUnknown,
    SlotsExhausted,
    SourceUnavailable,
)
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import Digest, SlotId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.session import SessionTerms

from tests.fakes.parts import (
    IDLE_SECONDS,
    MODEL,
    SITE,
    Bench,
    Weights,
    digest_of,
    make_bench,
    settle,
    vector,
    weights_of,
)
from tests.fakes.steps import (
    ENGINE,
    computed,
    finish,
    forward,
    loaded,
    map_names,
    open_session,
    read_by,
    ref,
    run_all,
    start_load,
)

# Loads


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


# Victims, keeps, unload


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


# Readers and writers


async def test_a_fill_waits_for_the_kernel_that_reads_its_slot() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    session = open_session(bench)
    reading = forward(bench, session, map_names(bench, session, "a"))
    await settle()
    bench.cache.unload(ref("a"), force=True)
    writing = start_load(bench, "b", "b1")
    await settle()
    bench.load_pool.run_one()  # the check
    await settle()
    assert bench.cache.layout[SlotId(0)].state is SlotState.FILLING
    assert not bench.load_pool.jobs
    bench.compute_pool.run_one()
    await settle()
    assert isinstance(reading.exception(), LayoutStale)
    assert len(bench.load_pool.jobs) == 1
    (result,) = await finish(bench, writing)
    assert result.resident.slot == 0
    assert bench.device.written_while_read == []


@pytest.mark.parametrize("turns", range(10))
async def test_a_slot_is_marked_before_its_mapping_is_checked(turns: int) -> None:
    """A fill that begins at any turn of the loop finds the Forward marked, or is found by its check."""
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    bench.clock.now += IDLE_SECONDS
    bench.cache.expire()
    loading = start_load(bench, "b", "b1")
    await settle()
    computing = forward(bench, session, mapping)
    for _ in range(turns):
        await asyncio.sleep(0)
    bench.load_pool.run_one()
    result, _ = await finish(bench, computing, loading)
    assert isinstance(result, LayoutStale) or read_by(result) == [str(digest_of("a1"))]
    assert not bench.device.written_while_read
    assert not bench.device.read_while_written


async def test_readers_elsewhere_are_told_before_bytes_change() -> None:
    """Ordinary loads and forced ones: no byte of a slot changes before the words say so."""
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    await loaded(bench, "b", "b1")
    bench.cache.unload(ref("b"), force=True)
    await loaded(bench, "c", "c1")
    assert bench.device.unannounced == []
    assert bench.device.published is bench.cache.layout


async def test_the_slot_stays_marked_when_the_caller_of_a_forward_goes_away() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    session = open_session(bench)
    reading = forward(bench, session, map_names(bench, session, "a"))
    await settle()
    reading.cancel()
    bench.cache.close_session(session)
    writing = start_load(bench, "b", "b1")
    await settle()
    bench.load_pool.run_one()  # the check
    await settle()
    assert not bench.load_pool.jobs
    bench.compute_pool.run_one()
    await finish(bench, writing)
    assert bench.device.written_while_read == []
    assert bench.cache.forwards_in_flight == 0


async def test_a_late_forward_never_gets_the_rows_of_a_newer_mapping_of_its_id() -> None:
    bench = make_bench(2)
    await loaded(bench, "a", "a1")
    await loaded(bench, "b", "b1")
    session = open_session(bench)
    late = map_names(bench, session, "a")
    newer = map_names(bench, session, "b")
    assert newer.generation > late.generation
    with pytest.raises(LayoutStale):
        await computed(bench, session, late)
    bench.cache.release_mapping(session, 0)
    newest = map_names(bench, session, "a")
    with pytest.raises(LayoutStale):
        await computed(bench, session, newer)
    assert read_by(await computed(bench, session, newest)) == [str(digest_of("a1"))]


# Sessions and mappings


async def test_a_mapping_is_all_or_nothing_and_lists_every_ref_at_fault() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    await loaded(bench, "b", "b1")
    session = open_session(bench)
    mapping = map_names(bench, session, "b", None)
    for names, error, listed in (
        (("b", "x", "y"), AdapterNotFound, "x, y"),
        (("b", "a"), AdapterNotResident, "a"),
    ):
        with pytest.raises(error) as refusal:
            map_names(bench, session, *names)
        assert refusal.value.facts["adapters"] == listed
    assert read_by(await computed(bench, session, mapping)) == [str(digest_of("b1")), ""]


async def test_a_session_whose_grace_has_passed_leaves_nothing() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    session = bench.cache.open_session(ENGINE, None)
    mapping = map_names(bench, session.session_id, "a")
    assert session.attachment is not None
    bench.cache.detach_session(session, session.attachment)
    bench.clock.now += 9.9
    bench.cache.expire()
    await computed(bench, session.session_id, mapping)
    bench.clock.now += 0.1
    bench.cache.expire()
    assert not bench.cache.residency.pins.pinned()
    with pytest.raises(SessionNotFound):
        await computed(bench, session.session_id, mapping)
    await loaded(bench, "b", "b1")


async def test_a_session_of_another_model_is_refused_and_leaves_nothing() -> None:
    bench = make_bench(1, model=None)
    bench.cache.open_session(SessionTerms("first", 10.0), MODEL)
    other = type(MODEL).of([type(MODEL.sites[0])("elsewhere", 1, 1)])
    with pytest.raises(Exception, match="elsewhere"):
        bench.cache.open_session(SessionTerms("second", 10.0), other)
    assert len(bench.cache.sessions) == 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"row_counts": [1]}, ShapeMismatch),
        ({"row_counts": [1, 1, 1]}, ShapeMismatch),
        ({"row_counts": [2, 1], "items": [ForwardItem(SITE, vector(2))]}, ShapeMismatch),
        ({"row_counts": [1 << 40, 1]}, RequestInvalid),
        ({"row_counts": [1000, 1000], "items": [ForwardItem(SITE, vector(2000))]}, CapacityExceeded),
        ({"items": []}, RequestInvalid),
        ({"items": [ForwardItem(SITE, vector(2))] * 2}, RequestInvalid),
        ({"items": [ForwardItem("nowhere", vector(2))]}, SiteUnknown),
        ({"generation": 1 << 60}, LayoutStale),
    ],
)
async def test_a_forward_that_does_not_fit_is_refused_before_any_kernel(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    session = open_session(bench)
    mapping = map_names(bench, session, "a", None)
    if 1 << 40 in changes.get("row_counts", ()):
        changes = changes | {"items": [ForwardItem(SITE, vector(2))]}
    with pytest.raises(error):
        await computed(bench, session, mapping, **changes)
    assert not bench.compute_pool.jobs
    with pytest.raises(MappingNotFound):
        await computed(bench, session, Mapping(9, Folded.of(()), mapping.epoch, 1))


async def test_a_server_that_shuts_down_computes_but_takes_nothing_new() -> None:
    bench = make_bench(1)
    await loaded(bench, "a", "a1")
    session = open_session(bench)
    mapping = map_names(bench, session, "a")
    bench.cache.shut_down()
    await computed(bench, session, mapping)
    with pytest.raises(ShuttingDown):
        await loaded(bench, "b", "b1")
    with pytest.raises(ShuttingDown):
        open_session(bench)
    with pytest.raises(ShuttingDown):
        bench.cache.resume_session(session, None)


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


# What a review found


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


async def test_a_device_without_memory_refuses_the_session_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(1, model=None)

    def shape(model: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(bench.device, "shape", shape)
    with pytest.raises(RuntimeError):
        bench.cache.open_session(SessionTerms("engine", 10.0), MODEL)
    assert len(bench.cache.sessions) == 0
    assert bench.cache.model is None


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
