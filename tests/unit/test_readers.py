"""The cache, step by step: kernels that read, fills that write, and the sessions and mappings they are for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from slotcar_sidecar.core.errors import (
    AdapterNotFound,
    AdapterNotResident,
    CapacityExceeded,
    LayoutStale,
    MappingNotFound,
    RequestInvalid,
    SessionNotFound,
    ShapeMismatch,
    ShuttingDown,
    SiteUnknown,
)
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.session import SessionTerms

from tests.fakes.parts import (
    IDLE_SECONDS,
    MODEL,
    SITE,
    digest_of,
    make_bench,
    settle,
    vector,
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
    start_load,
)


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


async def test_a_device_without_memory_refuses_the_session_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(1, model=None)

    def shape(model: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(bench.device, "shape", shape)
    with pytest.raises(RuntimeError):
        bench.cache.open_session(SessionTerms("engine", 10.0), MODEL)
    assert len(bench.cache.sessions) == 0
    assert bench.cache.model is None
