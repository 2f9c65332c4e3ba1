"""The journal's file: what is no file is refused, and left where it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from slotcar_sidecar.store.journal import JournalFile


def folder(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("elsewhere")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (folder, "it is a folder, wanted a file"),
        (pipe, "it is no regular file, wanted a file"),
        (link, "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_refused(make: Callable[[Path], None], found: str, tmp_path: Path) -> None:
    make(tmp_path / "journal")
    journal = JournalFile(tmp_path / "journal")
    descriptors = open_descriptors()
    with pytest.raises(OSError, match=found):
        journal.read()
    assert open_descriptors() == descriptors
    journal.close()
    assert {each.name for each in tmp_path.iterdir()} == {"journal", "journal.lock"}
