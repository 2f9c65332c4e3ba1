"""The disk tier beneath memory: what comes from where, what may leave memory, and what goes when nobody wants it."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from slotcar_sidecar.core.bindings import OnConflict
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import CapacityExceeded, SourceUnavailable
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest

from tests.fakes.disk import FakeFolder
from tests.fakes.parts import Bench, FakeUpload, StepExecutor, digest_of, make_bench, settle
from tests.fakes.steps import finish, held, loaded, mapped, open_session, ref, run_all, start_load


def bench_on(folder: FakeFolder, **settings: int) -> Bench:
    return make_bench(2, folder=folder, **settings)  # type: ignore[arg-type]


async def uploaded(bench: Bench, name: str, content: str, **options: object) -> None:
    """What comes with the call has no source."""
    call = LoadCall(ref(name), upload=FakeUpload(content), on_conflict=OnConflict.REPLACE, **options)  # type: ignore[arg-type]
    (result,) = await finish(bench, asyncio.get_running_loop().create_task(bench.cache.load(call)))
    if isinstance(result, BaseException):
        raise result


async def finish_far(bench: Bench, far: StepExecutor, *tasks: asyncio.Task[object]) -> None:
    """Runs what is far, and what follows from it, until the tasks are done."""
    await settle()
    while not all(task.done() for task in tasks):
        pool = far if far.jobs else bench.load_pool
        pool.run_one()
        await settle()
    await asyncio.gather(*tasks)


def faults(bench: Bench) -> list[tuple[Digest | None, str]]:
    return [(event.digest, event.reason) for event in bench.seen if event.kind is EventKind.STORAGE_FAULT]


async def test_a_source_that_was_not_read_takes_no_uploads_place() -> None:
    """The upload would be dropped for good. To see it fail: note whatever source comes with the digest."""
    bench = bench_on(FakeFolder(10))
    await uploaded(bench, "a", "a", in_slot=False)
    bench.cache.tiers.host.drop(digest_of("a"))
    call = LoadCall(AdapterRef(AdapterName("b"), digest_of("a")), "/nothing-here", in_slot=False)
    (result,) = await finish(bench, asyncio.get_running_loop().create_task(bench.cache.load(call)))
    assert not isinstance(result, BaseException)
    assert bench.source.reads == []
    assert bench.cache.residency.names.is_without_source(digest_of("a"))
    assert bench.cache.residency.names.source_of(ref("b")) == ""


async def test_a_known_digest_comes_from_memory_then_from_disk_then_from_its_source() -> None:
    folder = FakeFolder(10)
    bench = bench_on(folder)
    await loaded(bench, "a", "a", in_slot=False)
    for drop in (lambda: None, lambda: bench.cache.tiers.host.drop(digest_of("a"))):
        drop()
        await loaded(bench, "a", in_slot=False)
        assert bench.source.reads == ["/a"]
        assert digest_of("a") in bench.cache.tiers.host
    bench.cache.tiers.host.drop(digest_of("a"))
    folder.lose(digest_of("a"))
    await loaded(bench, "a", in_slot=False)
    assert bench.source.reads == ["/a", "/a"]
    assert digest_of("a") in folder.entries


async def test_a_name_may_be_given_to_what_is_on_disk_without_a_look_at_its_source() -> None:
    folder = FakeFolder(10)
    await loaded(bench_on(folder), "a", "a")
    folder.begin_life()
    bench = bench_on(folder)
    result = await loaded(bench, f"b@{digest_of('a')}", "gone", in_slot=False)
    assert bench.source.reads == []
    assert (result.resident.source, result.resident.adapter.source) == ("/b", "/b")
    assert folder.needed == {digest_of("a"): False}


async def test_an_upload_leaves_memory_once_it_is_on_disk() -> None:
    folder = FakeFolder(10)
    bench = bench_on(folder, host_bytes=1)
    await uploaded(bench, "a", "a")
    await uploaded(bench, "b", "b")
    assert folder.needed == {digest_of("a"): True, digest_of("b"): True}
    assert bench.cache.capacity().host.held_bytes == 0
    assert bench.cache.capacity().disk == dataclasses.replace(bench.cache.capacity().disk, used_bytes=2, held_bytes=2)
    await loaded(bench, "a", in_slot=False)
    assert digest_of("a") in bench.cache.tiers.host
    session = open_session(bench)
    await held(bench, session, "b")
    assert digest_of("b") in bench.cache.tiers.host


@pytest.mark.parametrize("full", [True, False])
async def test_an_upload_that_the_disk_does_not_take_stays_in_memory(full: bool) -> None:
    folder = FakeFolder(10)
    folder.is_full = full
    bench = bench_on(folder, host_bytes=1) if full else make_bench(2, host_bytes=1)
    await uploaded(bench, "a", "a", in_slot=False)
    assert bench.cache.capacity().host.held_bytes == 1
    with pytest.raises(CapacityExceeded):
        await uploaded(bench, "b", "b", in_slot=False)
    assert faults(bench) == ([(digest_of("a"), "the disk is full")] if full else [])


async def test_an_upload_whose_entry_is_damaged_is_gone_and_says_so() -> None:
    folder = FakeFolder(10)
    bench = bench_on(folder)
    await uploaded(bench, "a", "a", in_slot=False)
    bench.cache.tiers.host.drop(digest_of("a"))
    folder.damaged.add(digest_of("a"))
    with pytest.raises(SourceUnavailable, match="upload it again"):
        await loaded(bench, "a")
    await uploaded(bench, "a", "a", in_slot=False)
    assert folder.needed[digest_of("a")]


async def test_a_damaged_entry_is_told_of_and_read_from_its_source() -> None:
    folder = FakeFolder(10)
    bench = bench_on(folder)
    await loaded(bench, "a", "a", in_slot=False)
    bench.cache.tiers.host.drop(digest_of("a"))
    folder.damaged.add(digest_of("a"))
    await loaded(bench, "a")
    assert faults(bench) == [(digest_of("a"), "the entry is damaged: a test did it")]
    assert bench.source.reads == ["/a", "/a"]
    assert digest_of("a") in folder.entries
    assert not folder.damaged


async def test_a_disk_that_is_full_holds_up_no_load() -> None:
    folder = FakeFolder(10)
    folder.is_full = True
    bench = bench_on(folder)
    await loaded(bench, "a", "a")
    assert faults(bench) == [(digest_of("a"), "the disk is full")]
    assert bench.cache.residency.describe(ref("a")).slot is not None


async def test_an_unload_takes_the_bytes_from_every_tier_when_nobody_has_them_any_more() -> None:
    folder = FakeFolder(10)
    bench = bench_on(folder)
    await loaded(bench, "a", "same")
    await loaded(bench, "b", "same")
    bench.cache.unload(ref("a"), force=False)
    assert digest_of("same") in folder.entries
    session = open_session(bench)
    await mapped(bench, session, "b")
    bench.cache.unload(ref("b"), force=False)
    assert digest_of("same") in folder.entries
    bench.cache.release_mapping(session, 0)
    assert digest_of("same") not in folder.entries
    assert digest_of("same") not in bench.cache.tiers.host
    assert bench.cache.capacity().disk.used_bytes == 0


async def test_what_is_forgotten_while_it_waits_to_be_written_is_not_written() -> None:
    folder, pool = FakeFolder(10), StepExecutor()
    bench = make_bench(2, folder=folder, disk_pool=pool)
    await loaded(bench, "a", "a")
    await loaded(bench, "b", "b")
    bench.cache.unload(ref("a"), force=False)
    await loaded(bench, "a", "a")
    while pool.jobs:
        if pool.jobs[0][0].set_running_or_notify_cancel():
            pool.run_one()
        else:
            pool.jobs.popleft()
    assert {*folder.entries} == {digest_of("a"), digest_of("b")} == {*folder.needed}
    bench.cache.unload(ref("b"), force=False)
    while pool.jobs:
        pool.run_one()
    assert {*folder.entries} == {digest_of("a")} == {*folder.needed}


async def test_a_load_does_not_wait_for_the_disk_but_an_upload_does() -> None:
    pool = StepExecutor()
    bench = make_bench(2, folder=FakeFolder(10), disk_pool=pool)
    await loaded(bench, "a", "a")
    call = LoadCall(ref("b"), upload=FakeUpload("b"))
    task = asyncio.get_running_loop().create_task(bench.cache.load(call))
    await run_all(bench)
    assert not task.done()
    assert bench.cache.residency.describe(ref("b")).slot is not None
    while pool.jobs:
        pool.run_one()
    await settle()
    assert task.done()


async def test_slow_sources_hold_up_nobody_else() -> None:
    """All the places of what is far are taken, and so are its threads."""
    far = StepExecutor()
    bench = make_bench(2, remote_pool=far)
    tasks = []
    for number in range(6):
        uri = f"far:{number}"
        bench.source.contents[uri] = uri
        call = LoadCall(ref(f"n{number}"), uri, in_slot=False)
        tasks.append(asyncio.get_running_loop().create_task(bench.cache.load(call)))
    await settle()
    assert far.jobs
    await loaded(bench, "near", "near")
    assert bench.cache.residency.describe(ref("near")).slot is not None
    await finish_far(bench, far, *tasks)


async def test_what_is_far_and_on_disk_is_near() -> None:
    folder, far = FakeFolder(10), StepExecutor()
    bench = make_bench(2, folder=folder, remote_pool=far)
    bench.source.contents["far:a"] = "a"
    task = asyncio.get_running_loop().create_task(bench.cache.load(LoadCall(ref("a"), "far:a", in_slot=False)))
    await finish_far(bench, far, task)
    bench.cache.tiers.host.drop(digest_of("a"))
    await loaded(bench, "a")
    assert not far.jobs
    assert bench.source.reads == ["far:a"]


async def test_a_refused_load_leaves_no_claim_on_the_disk() -> None:
    folder = FakeFolder(10)
    bench = bench_on(folder)
    await loaded(bench, "a", "a")
    (error,) = await finish(bench, start_load(bench, "a", "other"))
    assert error.reason == "ADAPTER_CONFLICT"
    assert {*folder.entries} == {digest_of("a")}
