"""No link, race or odd file leads a read outside the root, or mixes two states of an adapter."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slotcar_sidecar.core.errors import SlotcarError, SourceDenied, SourceUnavailable
from slotcar_sidecar.store.sources.folder import FileVersion, Folder, folder_beneath
from slotcar_sidecar.store.sources.local import LocalSource

from tests.adapters import CONFIG_FILE, WEIGHTS_FILE


def link_folder(root: Path) -> Path:
    (root / "link").symlink_to(root.parent / "secret")
    return root / "link"


def link_inside(root: Path) -> Path:
    (root / "link").symlink_to("good")
    return root / "link"


def link_parent(root: Path) -> Path:
    (root / "up").symlink_to(root.parent)
    return root / "up" / "secret"


def link_config(root: Path) -> Path:
    (root / "good" / CONFIG_FILE).unlink()
    (root / "good" / CONFIG_FILE).symlink_to(root.parent / "secret" / CONFIG_FILE)
    return root / "good"


def link_weights(root: Path) -> Path:
    (root / "good" / WEIGHTS_FILE).unlink()
    (root / "good" / WEIGHTS_FILE).symlink_to("/etc/passwd")
    return root / "good"


def dangling_weights(root: Path) -> Path:
    (root / "good" / WEIGHTS_FILE).unlink()
    (root / "good" / WEIGHTS_FILE).symlink_to("nowhere")
    return root / "good"


def pipe(root: Path) -> Path:
    (root / "good" / WEIGHTS_FILE).unlink()
    os.mkfifo(root / "good" / WEIGHTS_FILE)
    return root / "good"


def config_folder(root: Path) -> Path:
    (root / "good" / CONFIG_FILE).unlink()
    (root / "good" / CONFIG_FILE).mkdir()
    return root / "good"


@pytest.mark.parametrize(
    ("arrange", "named"),
    [
        (link_folder, "link"),
        (link_inside, "link"),
        (link_parent, "up"),
        (link_config, CONFIG_FILE),
        (link_weights, WEIGHTS_FILE),
        (dangling_weights, WEIGHTS_FILE),
        (pipe, WEIGHTS_FILE),
        (config_folder, CONFIG_FILE),
    ],
)
def test_links_and_odd_files_are_denied_by_name(
    arrange: Callable[[Path], Path], named: str, root: Path, source: LocalSource
) -> None:
    uri = source.canonical(str(arrange(root)))
    for call in (source.version, source.read):
        with pytest.raises(SourceDenied) as caught:
            call(uri)
        assert named in caught.value.message


OPEN: list[int] = []


@pytest.fixture
def closing() -> Iterator[None]:
    """Closes what a change left open."""
    yield
    while OPEN:
        os.close(OPEN.pop())


def swap_for_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parents[2] / "secret" / path.name)


def swap_for_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def swap_for_open_pipe(path: Path) -> None:
    """A pipe that somebody writes to: a read would have to wait."""
    swap_for_pipe(path)
    OPEN.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def shrink(path: Path) -> None:
    os.truncate(path, 10)


def grow(path: Path) -> None:
    os.truncate(path, 10_000)


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (swap_for_link, SourceDenied),
        (swap_for_pipe, SourceUnavailable),
        (swap_for_open_pipe, SourceUnavailable),
        (shrink, SourceUnavailable),
        (grow, SourceUnavailable),
        (replace, SourceUnavailable),
        (Path.unlink, SourceUnavailable),
    ],
)
@pytest.mark.usefixtures("closing")
@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_file_that_changes_between_look_and_read(
    change: Callable[[Path], None], error: type[SlotcarError], name: str, root: Path
) -> None:
    with folder_beneath(root, ("good",)) as folder:
        version = folder.version(name)
        assert version is not None
        change(root / "good" / name)
        with pytest.raises(error):
            folder.read(name, version)


def test_a_file_that_is_written_while_it_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder_beneath(root, ("good",)) as folder:
        config = folder.version(CONFIG_FILE)
        assert config is not None
        looks: list[int] = []
        fstat = os.fstat

        def write_before_the_second_look(descriptor: int) -> os.stat_result:
            looks.append(descriptor)
            if len(looks) == 2:
                os.utime(root / "good" / CONFIG_FILE, ns=(1, 1))
            return fstat(descriptor)

        monkeypatch.setattr(os, "fstat", write_before_the_second_look)
        with pytest.raises(SourceUnavailable, match="changed while it was read"):
            folder.read(CONFIG_FILE, config)


def test_two_files_of_different_saves_are_not_mixed(
    root: Path, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Folder.read

    def read_then_save(folder: Folder, name: str, version: FileVersion) -> bytes:
        data = read(folder, name, version)
        if name == WEIGHTS_FILE:
            replace(root / "good" / CONFIG_FILE)
        return data

    monkeypatch.setattr(Folder, "read", read_then_save)
    with pytest.raises(SourceUnavailable, match="changed while it was read"):
        source.read(str(root / "good"))


def test_a_folder_swapped_for_a_link_after_it_was_opened(root: Path) -> None:
    with folder_beneath(root, ("good",)) as folder:
        config = folder.version(CONFIG_FILE)
        assert config is not None
        (root / "good").rename(root / "moved")
        (root / "good").symlink_to(root.parent / "secret")
        assert folder.version(CONFIG_FILE) == config
        assert folder.read(CONFIG_FILE, config) == (root / "moved" / CONFIG_FILE).read_bytes()


def test_a_link_that_became_a_folder_again_is_not_taken_for_a_file(
    root: Path, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_descriptor = os.open

    def as_for_a_link(name: str, flags: int, *, dir_fd: int | None = None) -> int:
        if name == "good":
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory")
        return open_descriptor(name, flags, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", as_for_a_link)
    with pytest.raises(SourceUnavailable, match="changed"):
        source.read(str(root / "good"))


def test_a_race_never_reads_outside(root: Path, source: LocalSource) -> None:
    """A thread swaps the folder for a link to the outside, and back, as fast as it can."""
    good = source.read(str(root / "good")).adapter.digest
    stop = threading.Event()

    def swap() -> None:
        (root / "link").symlink_to(root.parent / "secret")
        while not stop.is_set():
            (root / "good").rename(root / "moved")
            (root / "link").rename(root / "good")
            (root / "good").rename(root / "link")
            (root / "moved").rename(root / "good")

    thread = threading.Thread(target=swap)
    thread.start()
    outcomes: set[object] = set()
    try:
        for _ in range(500):
            try:
                outcomes.add(source.read(str(root / "good")).adapter.digest)
            except (SourceDenied, SourceUnavailable) as error:
                outcomes.add(type(error))
    finally:
        stop.set()
        thread.join()
    assert outcomes <= {good, SourceDenied, SourceUnavailable}


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_the_version_follows_each_file(name: str, root: Path, source: LocalSource) -> None:
    before = source.version(str(root / "good"))
    replace(root / "good" / name)
    assert source.version(str(root / "good")) != before
    assert hash(before) == hash(before)


def test_no_descriptor_is_left_open(root: Path, source: LocalSource) -> None:
    link_folder(root)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for uri in (root / "good", root / "link", root / "missing", root / "good" / CONFIG_FILE):
        try:
            source.version(str(uri))
            source.read(str(uri))
        except SlotcarError:
            pass
    assert len(list(descriptors.iterdir())) == before
