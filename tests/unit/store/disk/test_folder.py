"""The folder of the disk tier: what it keeps, what gives way, what it refuses, and what other sidecars keep it from."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from slotcar_sidecar.store.disk.entry import Damaged, entry_bytes, pieces_of
from slotcar_sidecar.store.disk.folder import DiskFolder, Step
from slotcar_sidecar.store.disk.places import NotOurs
from slotcar_sidecar.store.weights import HostWeights

from tests.fakes.stored import entry_path, open_folder, same, stored_weights

ONE, TWO, THREE, FOUR = (stored_weights(seed) for seed in range(1, 5))
SIZE = entry_bytes(pieces_of(ONE, 1000.0))


class Clock:
    """Each look is a second later."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(path: Path, clock: Clock) -> Iterator[DiskFolder]:
    folder = open_folder(path, 3 * SIZE + 100, clock=clock)
    yield folder
    folder.close()


def kept(path: Path, *adapters: HostWeights) -> list[bool]:
    return [entry_path(path, each.adapter.digest).exists() for each in adapters]


# What it keeps


def test_what_was_written_comes_back_also_in_a_later_life(folder: DiskFolder, path: Path) -> None:
    assert folder.write(ONE, only=False) == ("written", ({ONE.adapter.digest: SIZE}, {}), "")
    assert folder.write(ONE, only=False).result == "present"
    assert folder.read(TWO.adapter.digest) is None
    assert same(ONE, folder.read(ONE.adapter.digest))
    folder.close()
    later = open_folder(path)
    assert later.list().changes.came == {ONE.adapter.digest: SIZE}
    assert same(ONE, later.read(ONE.adapter.digest))
    found, outcome = later.adopt({ONE.adapter.digest: False, TWO.adapter.digest: False})
    assert (found, outcome.result) == ({ONE.adapter.digest: ONE.adapter}, "adopted")


def test_files_and_folders_are_nobody_elses(folder: DiskFolder, path: Path) -> None:
    folder.write(ONE, only=True)
    modes = {each.stat().st_mode & 0o777 for each in path.rglob("*") if each.is_file()}
    assert modes == {0o600}
    assert {each.stat().st_mode & 0o777 for each in (path, *path.rglob("*")) if each.is_dir()} == {0o700}


def test_the_least_recently_used_give_way_also_in_a_later_life(folder: DiskFolder, path: Path, clock: Clock) -> None:
    for each in (ONE, TWO, THREE):
        folder.write(each, only=False)
    folder.read(ONE.adapter.digest)
    folder.touch([TWO.adapter.digest])
    folder.close()
    later = open_folder(path, 3 * SIZE + 100, clock=clock)
    later.list()
    assert later.write(FOUR, only=False).changes == ({FOUR.adapter.digest: SIZE}, {THREE.adapter.digest: "evicted"})
    assert kept(path, ONE, TWO, THREE, FOUR) == [True, True, False, True]


def test_what_nothing_else_has_never_gives_way(folder: DiskFolder, path: Path) -> None:
    folder.write(ONE, only=True)
    folder.write(TWO, only=True)
    folder.write(THREE, only=False)
    assert folder.write(FOUR, only=True).result == "written"
    outcome = folder.write(THREE, only=False)
    assert (outcome.result, outcome.fault) == (
        "full",
        f"{SIZE} bytes do not fit into {3 * SIZE + 100}, of which {3 * SIZE} may not be dropped",
    )
    assert kept(path, ONE, TWO, THREE, FOUR) == [True, True, False, True]
    folder.remove(ONE.adapter.digest)
    assert folder.write(THREE, only=False).result == "written"


def test_what_is_read_now_does_not_give_way(folder: DiskFolder, path: Path) -> None:
    for each in (ONE, TWO, THREE):
        folder.write(each, only=False)
    with folder._shelves.entry(ONE.adapter.digest) as descriptor:
        assert descriptor is not None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        assert folder.write(FOUR, only=False).changes.went == {TWO.adapter.digest: "evicted"}
        assert folder.remove(ONE.adapter.digest).changes.went == {}
    assert kept(path, ONE, TWO, THREE, FOUR) == [True, False, True, True]


def test_what_is_larger_than_the_tier_is_not_written(path: Path) -> None:
    folder = open_folder(path, SIZE - 1)
    assert folder.write(ONE, only=False).result == "full"
    assert [*path.rglob("*/*/*")] == []


# What it refuses to believe


def test_a_changed_entry_is_not_read_but_set_aside(folder: DiskFolder, path: Path) -> None:
    """Also one that was verified before: another time of change is another file."""
    folder.write(ONE, only=False)
    assert same(ONE, folder.read(ONE.adapter.digest))
    file = entry_path(path, ONE.adapter.digest)
    data = bytearray(file.read_bytes())
    data[pieces_of(ONE, 1000.0)[1].start] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match="its weights have digest"):
        folder.read(ONE.adapter.digest)
    assert folder.discard(ONE.adapter.digest).changes.went == {ONE.adapter.digest: "damaged"}
    assert folder.read(ONE.adapter.digest) is None
    assert folder.write(ONE, only=False).result == "written"
    assert same(ONE, folder.read(ONE.adapter.digest))


def test_an_entry_that_was_replaced_by_a_good_one_stays(folder: DiskFolder) -> None:
    folder.write(ONE, only=False)
    assert folder.discard(ONE.adapter.digest).result == "replaced"
    assert same(ONE, folder.read(ONE.adapter.digest))


def test_what_nothing_else_has_is_written_again_unless_it_is_verified(path: Path) -> None:
    open_folder(path).write(ONE, only=False)
    later = open_folder(path)
    file = entry_path(path, ONE.adapter.digest)
    file.write_bytes(b"\0" * SIZE)
    assert later.write(ONE, only=True).result == "written"
    assert same(ONE, later.read(ONE.adapter.digest))
    assert later.write(ONE, only=True).result == "present"


@pytest.mark.parametrize("what", ["link", "dangling", "folder", "pipe", "writable", "foreign", "shelf"])
def test_what_is_no_file_of_ours_is_not_opened(folder: DiskFolder, path: Path, what: str) -> None:
    folder.write(ONE, only=False)
    file = entry_path(path, ONE.adapter.digest)
    good = file.with_name("good")
    file.rename(good)
    if what == "link":
        file.symlink_to(good)
    elif what == "dangling":
        file.symlink_to(path / "nothing")
    elif what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "shelf":
        shelf = file.parent
        shelf.rename(path / "elsewhere")
        shelf.symlink_to(path / "elsewhere")
    else:
        good.rename(file)
        if what == "writable":
            file.chmod(0o620)
        elif os.geteuid() == 0:
            os.chown(file, 12345, -1)
        else:
            pytest.skip("only root gives files away")
    with pytest.raises((Damaged, OSError)):
        folder.read(ONE.adapter.digest)
    later = open_folder(path) if what != "shelf" else folder
    assert later.write(TWO, only=False).result == "written"


def test_a_folder_of_others_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "writable").mkdir()
    (tmp_path / "writable").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("writable", "link", "file"):
        with pytest.raises(NotOurs):
            open_folder(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_folder(tmp_path / "no" / "parent")


# What the disk does


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses to let a file grow beyond 1 KiB, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_is_a_fault_and_leaves_nothing(
    folder: DiskFolder, path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("small_files")
    outcome = folder.write(ONE, only=True)
    assert (outcome.result, outcome.fault) == ("failed", f"cannot write: {os.strerror(errno.EFBIG)}")
    assert [*path.glob("writing/*")] == []
    assert kept(path, ONE) == [False]


def test_a_folder_that_is_gone_is_a_fault(folder: DiskFolder, path: Path) -> None:
    folder.write(ONE, only=False)
    for each in sorted(path.rglob("*"), reverse=True):
        each.rmdir() if each.is_dir() else each.unlink()
    path.rmdir()
    assert folder.read(ONE.adapter.digest) is None
    assert folder.write(TWO, only=False).result == "failed"
    assert folder.remove(ONE.adapter.digest).result == "failed"
    assert folder.touch([ONE.adapter.digest]).result == "touched"
    assert folder.adopt({ONE.adapter.digest: False})[0] == {}


# Who shares it


def test_what_another_sidecar_needs_stays(folder: DiskFolder, path: Path) -> None:
    other = open_folder(path)
    folder.write(ONE, only=False)
    assert other.write(ONE, only=False) == ("present", ({ONE.adapter.digest: SIZE}, {}), "")
    assert folder.remove(ONE.adapter.digest).changes.went == {}
    assert kept(path, ONE) == [True]
    assert other.remove(ONE.adapter.digest).changes.went == {ONE.adapter.digest: "forgotten"}
    assert folder.list().changes.went == {ONE.adapter.digest: "elsewhere"}


def test_what_a_dead_sidecar_needed_does_not_count(folder: DiskFolder, path: Path) -> None:
    other = open_folder(path)
    other.write(ONE, only=True)
    assert folder.remove(ONE.adapter.digest).changes.went == {}
    other.close()
    assert folder.remove(ONE.adapter.digest).changes.went == {ONE.adapter.digest: "forgotten"}
    assert len([*path.glob("sidecars/*")]) == 1


def test_what_only_another_sidecar_has_never_gives_way(folder: DiskFolder, path: Path, clock: Clock) -> None:
    other = open_folder(path, clock=clock)
    for each in (ONE, TWO):
        other.write(each, only=True)
    folder.write(THREE, only=False)
    assert folder.write(FOUR, only=False).changes.went == {THREE.adapter.digest: "evicted"}
    assert kept(path, ONE, TWO) == [True, True]


def test_a_use_by_another_sidecar_counts(folder: DiskFolder, path: Path, clock: Clock) -> None:
    for each in (ONE, TWO, THREE):
        folder.write(each, only=False)
    other = open_folder(path, clock=clock)
    assert same(ONE, other.read(ONE.adapter.digest))
    assert folder.write(FOUR, only=False).changes.went == {TWO.adapter.digest: "evicted"}


@pytest.mark.parametrize("by", ["this", "another"])
def test_the_least_recently_used_gives_way_also_where_all_were_read(
    by: str, folder: DiskFolder, path: Path, clock: Clock
) -> None:
    for each in (ONE, TWO, THREE):
        folder.write(each, only=False)
    reader = folder if by == "this" else open_folder(path, clock=clock)
    for each in (THREE, TWO, ONE):
        assert same(each, reader.read(each.adapter.digest))
    outcome = folder.write(FOUR, only=True)
    assert (outcome.result, outcome.changes.went) == ("written", {THREE.adapter.digest: "evicted"})


def test_what_another_sidecar_is_writing_counts_and_what_a_dead_one_was_writing_goes(path: Path, clock: Clock) -> None:
    """The second sidecar writes while the first is in the midst of it."""
    outcomes = []

    def reach(step: Step) -> None:
        if step is Step.WRITTEN:
            outcomes.append(other.write(TWO, only=False))

    other = open_folder(path, 2 * SIZE - 1, clock=clock)
    folder = open_folder(path, 2 * SIZE - 1, clock=clock, reach=reach)
    assert folder.write(ONE, only=False).result == "written"
    assert [outcome.result for outcome in outcomes] == ["full"]
    (path / "writing" / "left.behind").write_bytes(b"\0" * SIZE)
    assert other.write(TWO, only=False).changes.went == {ONE.adapter.digest: "evicted"}
    assert [*path.glob("writing/*")] == []
