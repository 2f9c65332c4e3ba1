"""Files that change while the server runs: what can be used is in force, what cannot leaves what was, and is told."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.process.reload import Reloads

PATIENCE_SECONDS = 20
# Where no notice comes of a change, it is found by looking; where one does, nobody waits for this.
POLL_SECONDS, NEVER_SECONDS = 0.2, 3600.0


class Word:
    """A thing: one word of a file. `bad` is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.in_force = ""
        self.changed = asyncio.Event()
        self.tried = 0

    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def apply(self) -> None:
        self.tried += 1
        word = self.path.read_text().strip()
        self.changed.set()
        if word == "bad":
            raise OSError(f"{self.path} has 'bad': wanted a word")
        self.in_force = word

    async def until(self, wanted: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.in_force != wanted:
                self.changed.clear()
                await self.changed.wait()


def count(metrics: Metrics, what: str, result: str) -> float:
    registry: CollectorRegistry = metrics.registry
    return registry.get_sample_value("slotcar_reloads_total", {"what": what, "result": result}) or 0.0


def is_failing(metrics: Metrics, what: str) -> float | None:
    return metrics.registry.get_sample_value("slotcar_reload_failing", {"what": what})


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A mounted ConfigMap: each file is a link through `..data`, which is swapped as a whole."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    swap(folder, "first")
    (folder / "word").symlink_to("..data/word")
    return folder


def swap(folder: Path, word: str) -> None:
    """As a kubelet writes a new version."""
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    (version / "word").write_text(word)
    (folder / "..data_tmp").symlink_to(version.name)
    (folder / "..data_tmp").replace(folder / "..data")


def save(path: Path, word: str) -> None:
    """As a careful editor does."""
    beside = path.with_suffix(".new")
    beside.write_text(word)
    beside.replace(path)


@asynccontextmanager
async def running(reloads: Reloads) -> AsyncIterator[None]:
    chore = asyncio.create_task(reloads.run())
    yield
    chore.cancel()
    await asyncio.wait([chore])


async def test_a_swap_of_a_mounted_map_is_noticed(folder: Path, metrics: Metrics) -> None:
    """Not by looking now and then, but at once."""
    word, reloads = Word(folder / "word"), Reloads(metrics, NEVER_SECONDS)
    reloads.add("word", word.files, word.apply)
    assert (is_failing(metrics, "word"), count(metrics, "word", "applied")) == (0.0, 0.0)
    async with running(reloads):
        for version in ("second", "third"):
            swap(folder, version)
            await word.until(version)
    assert count(metrics, "word", "applied") >= 2


async def test_a_change_before_the_watch_began_is_noticed(tmp_path: Path, metrics: Metrics) -> None:
    path = tmp_path / "word"
    save(path, "first")
    word, reloads = Word(path), Reloads(metrics, NEVER_SECONDS)
    reloads.add("word", word.files, word.apply)
    save(path, "second")
    async with running(reloads):
        await word.until("second")


async def test_what_did_not_change_is_left_alone(tmp_path: Path, metrics: Metrics) -> None:
    """Others change in the same folder."""
    words = [Word(tmp_path / name) for name in ("one", "two")]
    for word in words:
        save(word.path, "first")
    reloads = Reloads(metrics, NEVER_SECONDS)
    for word in words:
        reloads.add(word.path.name, word.files, word.apply)
    async with running(reloads):
        save(words[0].path, "second")
        await words[0].until("second")
    assert words[1].tried == 0


async def test_a_folder_that_comes_later_is_found(tmp_path: Path, metrics: Metrics) -> None:
    """No notice comes of it, as nothing is there to be watched."""
    path = tmp_path / "later" / "word"
    word, reloads = Word(path), Reloads(metrics, POLL_SECONDS)
    reloads.add("word", word.files, word.apply)
    async with running(reloads):
        path.parent.mkdir()
        save(path, "first")
        await word.until("first")
        save(path, "second")
        await word.until("second")


@pytest.mark.parametrize("name", ["a\0b/word", "\ud800/word"])
async def test_what_can_be_no_path_holds_nobody_up(tmp_path: Path, metrics: Metrics, name: str) -> None:
    """A file may name anything as another. To see it fail: let `identity` raise what `stat` raises."""
    odd, good = Word(tmp_path / name), Word(tmp_path / "word")
    reloads = Reloads(metrics, POLL_SECONDS)
    for word in (odd, good):
        reloads.add("word", word.files, word.apply)
    async with running(reloads):
        for version in ("first", "second"):
            save(good.path, version)
            await good.until(version)


async def test_the_files_may_become_others(tmp_path: Path, metrics: Metrics) -> None:
    """As those that a policy names."""
    first, other = tmp_path / "a" / "word", tmp_path / "b" / "word"
    for path in (first, other):
        path.parent.mkdir()
        save(path, path.parent.name)
    word, reloads = Word(first), Reloads(metrics, POLL_SECONDS)
    reloads.add("word", word.files, word.apply)
    async with running(reloads):
        word.path = other
        await word.until("b")
        save(other, "c")
        await word.until("c")


async def test_a_bad_file_leaves_what_was(tmp_path: Path, metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, however often it is looked at; the other things go on."""
    bad, good = Word(tmp_path / "bad"), Word(tmp_path / "good")
    reloads = Reloads(metrics, POLL_SECONDS)
    for word in (bad, good):
        save(word.path, "first")
        reloads.add(word.path.name, word.files, word.apply)
        word.apply()
    async with running(reloads):
        save(bad.path, "bad")
        await until_tried(bad, 4)
        save(good.path, "second")
        await good.until("second")
        assert (bad.in_force, is_failing(metrics, "bad"), is_failing(metrics, "good")) == ("first", 1.0, 0.0)
        save(bad.path, "mended")
        await bad.until("mended")
    assert (is_failing(metrics, "bad"), count(metrics, "bad", "failed")) == (0.0, 1.0)
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.getMessage() == "cannot reload; what was in force stays"
    assert line.__dict__["fields"] == {"what": "bad", "reason": f"{bad.path} has 'bad': wanted a word"}
    assert line.exc_info is None


async def until_tried(word: Word, times: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while word.tried < times:
            word.changed.clear()
            await word.changed.wait()


async def test_a_file_that_goes_is_a_failure_until_it_is_back(tmp_path: Path, metrics: Metrics) -> None:
    word, reloads = Word(tmp_path / "word"), Reloads(metrics, NEVER_SECONDS)
    save(word.path, "first")
    reloads.add("word", word.files, word.apply)
    word.apply()
    word.path.unlink()
    reloads.all()
    assert (word.in_force, is_failing(metrics, "word")) == ("first", 1.0)
    save(word.path, "back")
    reloads.all()
    assert (word.in_force, is_failing(metrics, "word")) == ("back", 0.0)


async def test_a_signal_applies_what_did_not_change(tmp_path: Path, metrics: Metrics) -> None:
    """And what has no file to be watched; one that fails holds up no other."""
    word, reloads = Word(tmp_path / "word"), Reloads(metrics, NEVER_SECONDS)
    save(word.path, "first")
    asked: list[int] = []

    def broken() -> None:
        raise KeyError("a fault of ours")

    reloads.all()
    reloads.add("broken", tuple, broken)
    reloads.add("word", word.files, word.apply)
    reloads.add("asked", tuple, lambda: asked.append(os.getpid()))
    for _ in range(3):
        reloads.all()
    assert (word.tried, len(asked)) == (3, 3)
    assert (count(metrics, "broken", "failed"), count(metrics, "word", "applied")) == (3.0, 3.0)
