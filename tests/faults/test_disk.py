"""kill -9 at every point of the disk tier and of the journal: nothing wrong is read, and nothing is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from slotcar_sidecar.store.disk.folder import DiskFolder, Step
from slotcar_sidecar.store.journal import JournalFile, JournalStep

from tests.fakes.stored import entry_path, open_folder, same
from tests.faults.disk_child import (
    CAPACITY_BYTES,
    ENTRY_BYTES,
    LIBRARY,
    entries_of,
    run,
    start,
    use_disk,
    use_disk_at_random,
    write_journal,
)

KILLED = -signal.SIGKILL


def check_all(path: Path, folder: DiskFolder) -> list[bool]:
    """Every entry that has its name is whole; the bytes that count are those that are there."""
    found = []
    for weights in LIBRARY:
        read = folder.read(weights.adapter.digest)
        found.append(read is not None)
        assert found[-1] == entry_path(path, weights.adapter.digest).exists()
        assert read is None or same(weights, read)
    assert {entry.stat().st_size for entry in path.glob("sha256/*/*")} <= {ENTRY_BYTES}
    assert len([*path.glob("sha256/*/*")]) == sum(found) <= 3
    return found


@pytest.mark.parametrize("step", Step)
def test_a_sidecar_that_dies_at_any_point_harms_nobody(tmp_path: Path, step: Step) -> None:
    """Neither a sidecar that lives beside it, nor one that starts later."""
    path = tmp_path / "disk"
    beside = open_folder(path, CAPACITY_BYTES)
    assert run(use_disk, path, step) == KILLED
    for folder in (beside, open_folder(path, CAPACITY_BYTES)):
        check_all(path, folder)
        assert folder.write(LIBRARY[4], only=True).result in ("written", "present")
        assert check_all(path, folder)[4]
    assert [*path.glob("writing/*")] == []
    assert len([*path.glob("sidecars/*")]) == 2
    # What the dead one needed, and nothing else has, does not stay for ever.
    for weights in LIBRARY[:3]:
        assert beside.write(weights, only=False).result in ("written", "present")


def together(path: Path, rounds: int) -> None:
    """Two sidecars at a time use one small folder until each dies; the entries that they leave are whole."""
    lives = 0
    for round_number in range(rounds):
        pair = [start(use_disk_at_random, path, 10 * round_number + side, 7 + 13 * side) for side in range(2)]
        for process in pair:
            process.join(60)
            assert process.exitcode == KILLED
            lives += 1
        folder = open_folder(path, CAPACITY_BYTES)
        check_all(path, folder)
        folder.close()
    assert lives == 2 * rounds
    assert [*path.glob("writing/*")] == []


def test_two_sidecars_that_die_again_and_again_leave_no_wrong_entry(tmp_path: Path) -> None:
    together(tmp_path / "disk", 10)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_two_sidecars_that_die_a_thousand_times_leave_no_wrong_entry(tmp_path: Path) -> None:
    together(tmp_path / "disk", 500)


@pytest.mark.parametrize("step", JournalStep)
def test_a_journal_is_the_one_before_or_the_new_one(tmp_path: Path, step: JournalStep) -> None:
    path = tmp_path / "journal"
    assert run(write_journal, path, step) == KILLED
    journal = JournalFile(path)
    version = 2 if step is JournalStep.NAMED else 1
    assert list(journal.read()) == entries_of(version)
    journal.write(entries_of(3))
    assert list(journal.read()) == entries_of(3)
    assert {each.name for each in tmp_path.iterdir()} == {"journal", "journal.lock"}
