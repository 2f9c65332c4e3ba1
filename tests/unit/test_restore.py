"""The journal: what is written and when, and what a later life makes of it."""

from __future__ import annotations

import asyncio

import pytest
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import AdapterName
from slotcar_sidecar.core.journal import JournalEntry
from slotcar_sidecar.core.model import ModelSpec

from tests.fakes import steps
from tests.fakes.disk import FakeFolder
from tests.fakes.parts import MODEL, Bench, StepExecutor, digest_of, make_bench, settle
from tests.fakes.steps import loaded, map_names, open_session, ref


async def run_all(bench: Bench) -> None:
    """As steps.run_all, for what has a long way to go between its jobs."""
    for _ in range(5):
        await steps.run_all(bench)


class FakeJournal:
    """Implements core.ports.Journal; remembers every write."""

    def __init__(self) -> None:
        self.writes: list[list[JournalEntry]] = []
        self.fails = False

    def write(self, entries: list[JournalEntry]) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        self.writes.append(entries)


def entry(name: str, content: str, **fields: object) -> JournalEntry:
    settings = {"source": f"/{content}", "keep": False, "in_slot": True} | fields
    return JournalEntry(ref(f"{name}@{digest_of(content)}"), **settings)  # type: ignore[arg-type]


async def restored(
    *entries: JournalEntry, contents: str = "", slots: int = 2, model: ModelSpec | None = MODEL, **settings: object
) -> tuple[Bench, FakeJournal, asyncio.Task[None]]:
    """A later life with these entries, as far as it comes by itself; sources have each of `contents`."""
    bench, journal = make_bench(slots, model=model, **settings), FakeJournal()  # type: ignore[arg-type]
    bench.source.contents |= {f"/{content}": content for content in contents}
    await bench.cache.restore(entries, journal)
    task = asyncio.get_running_loop().create_task(bench.cache.restored())
    await run_all(bench)
    return bench, journal, task


def resident(bench: Bench) -> set[str]:
    return {str(each.name) for each in bench.cache.residency.describe_all() if each.slot is not None}


def names(bench: Bench) -> dict[str, str]:
    return {str(each.name): str(each.adapter.digest) for each in bench.cache.residency.describe_all()}


def failures(bench: Bench) -> dict[str, str]:
    return {str(found.name): why for found, why in bench.cache.capacity().restore_failures.items()}


async def test_the_latest_used_come_first_and_the_rest_are_names() -> None:
    entries = [entry(name, name) for name in "abc"]
    bench, _, task = await restored(*entries, contents="abc")
    assert task.done()
    assert resident(bench) == {"a", "b"}
    assert names(bench) == {name: str(digest_of(name)) for name in "abc"}
    assert bench.cache.residency.residents() == (digest_of("a"), digest_of("b"))
    assert bench.cache.capacity().restoring == 0
    # Nobody gave way, as only free slots are taken.
    assert not [event for event in bench.seen if event.kind is EventKind.EVICTED]


async def test_what_is_kept_comes_before_what_was_used_later() -> None:
    bench, _, _ = await restored(entry("a", "a"), entry("b", "b"), entry("c", "c", keep=True), contents="abc")
    assert resident(bench) == {"a", "c"}
    assert bench.cache.residency.names.kept == {AdapterName("c")}


async def test_names_on_disk_are_back_before_anything_is_read() -> None:
    folder = FakeFolder(10)
    await loaded(make_bench(2, folder=folder), "a", "a")
    folder.begin_life()
    bench = make_bench(2, folder=folder)
    await bench.cache.restore([entry("a", "a", history=(digest_of("old"),)), entry("b", "b")], FakeJournal())
    assert names(bench) == {"a": str(digest_of("a"))}
    assert bench.cache.residency.describe(ref("a")).history == (digest_of("old"),)
    assert bench.cache.capacity().restoring == 1
    assert folder.needed == {digest_of("a"): False}
    assert bench.source.reads == []


async def test_bytes_that_are_others_now_are_not_taken() -> None:
    bench, _, task = await restored(entry("a", "a"), entry("b", "b"))
    bench2, _, _ = await restored(entry("a", "a"), contents="")
    assert task.done()
    assert names(bench) == names(bench2) == {}
    assert {*failures(bench)} == {"a", "b"}
    bench3 = make_bench(2)
    bench3.source.contents["/a"] = "changed"
    await bench3.cache.restore([entry("a", "a")], FakeJournal())
    task3 = asyncio.get_running_loop().create_task(bench3.cache.restored())
    await run_all(bench3)
    assert task3.done()
    assert failures(bench3)["a"].startswith("DIGEST_MISMATCH")
    assert [event.reason[:15] for event in bench3.seen if event.kind is EventKind.REFUSED] == ["DIGEST_MISMATCH"]


async def test_what_hangs_holds_up_nobody() -> None:
    far = StepExecutor()
    slow = entry("slow", "slow", source="far:slow")
    bench, _, task = await restored(slow, entry("a", "a"), entry("b", "b"), contents="ab", slots=3, remote_pool=far)
    assert resident(bench) == {"a", "b"}
    assert not task.done()
    assert bench.cache.capacity().restoring == 1
    while not task.done():
        far.run_one()
        await run_all(bench)
    assert {*failures(bench)} == {"slow"}


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_who_decides_meanwhile_decides(verb: str) -> None:
    far = StepExecutor()
    bench, journal, task = await restored(entry("a", "gone"), entry("b", "b", source="far:b"), remote_pool=far)
    assert {*failures(bench)} == {"a"}
    if verb == "load":
        await loaded(bench, "a", "new")
        assert names(bench)["a"] == str(digest_of("new"))
    else:
        for name in "ab":
            with pytest.raises(Exception, match="there is no adapter"):
                bench.cache.unload(ref(name), force=False)
        assert bench.cache.capacity().restoring == 0
    assert "a" not in failures(bench)
    bench.cache.expire()
    await run_all(bench)
    assert {str(each.ref.name) for each in journal.writes[-1]} == ({"a", "b"} if verb == "load" else set())
    task.cancel()


async def test_without_a_model_names_come_back_and_slots_are_filled_when_it_is_known() -> None:
    bench, _, task = await restored(entry("a", "a", keep=True), contents="a", model=None)
    assert names(bench).keys() == {"a"}
    assert not task.done()
    bench.cache.adopt_model(MODEL)
    await run_all(bench)
    assert task.done()
    assert resident(bench) == {"a"}
    assert bench.cache.residency.names.kept == {AdapterName("a")}


async def test_a_keep_that_finds_no_slot_is_told_of_and_stays_in_the_journal() -> None:
    bench, journal, _ = await restored(entry("a", "a", keep=True), entry("b", "b", keep=True), contents="ab", slots=2)
    assert names(bench).keys() == {"a", "b"}
    assert {*failures(bench)} == {"b"}
    bench.cache.expire()
    await run_all(bench)
    assert {str(each.ref.name): each.keep for each in journal.writes[-1]} == {"a": True, "b": True}


async def test_changes_are_written_a_moment_later_and_together() -> None:
    bench, journal, _ = await restored()
    for name in "ab":
        await loaded(bench, name, name)
        bench.cache.expire()
        await settle()
    await run_all(bench)
    assert len(journal.writes) == 1
    bench.clock.now += 1.0
    bench.cache.expire()
    await run_all(bench)
    assert [[str(each.ref.name) for each in write] for write in journal.writes] == [["a"], ["b", "a"]]
    bench.clock.now += 100.0
    bench.cache.expire()
    await run_all(bench)
    assert len(journal.writes) == 2


async def test_an_order_alone_is_written_now_and_then_and_at_the_end() -> None:
    bench, journal, _ = await restored()
    for name in "ab":
        await loaded(bench, name, name)
    await finish_flush(bench)
    map_names(bench, open_session(bench), "a")
    bench.clock.now += 2.0
    bench.cache.expire()
    await run_all(bench)
    assert len(journal.writes) == 1
    await finish_flush(bench)
    assert [str(each.ref.name) for each in journal.writes[-1]] == ["a", "b"]


async def finish_flush(bench: Bench) -> None:
    flush = asyncio.get_running_loop().create_task(bench.cache.flush())
    await run_all(bench)
    await flush


async def test_a_journal_that_cannot_be_written_is_told_of_once_and_tried_again() -> None:
    bench, journal, _ = await restored()
    journal.fails = True
    await loaded(bench, "a", "a")
    for _ in range(3):
        bench.clock.now += 1.0
        bench.cache.expire()
        await run_all(bench)
    faults = [event.reason for event in bench.seen if event.kind is EventKind.STORAGE_FAULT]
    assert faults == ["the journal cannot be written: No space left on device"]
    journal.fails = False
    bench.clock.now += 1.0
    bench.cache.expire()
    await run_all(bench)
    assert len(journal.writes) == 1
