"""Adapters come from beneath the allowed roots only, whole, whatever links, races and odd files are in the way."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from slotcar_sidecar.core.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    CapacityExceeded,
    SlotcarError,
    SourceDenied,
    SourceUnavailable,
)
from slotcar_sidecar.store.folder import CONVERT_COMMAND, FileVersion, Folder, folder_beneath
from slotcar_sidecar.store.source import LocalSource

from tests.adapters import CONFIG_FILE, MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter

SITE = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one good adapter, `good`; beside it, outside, another, `secret`."""
    write_raw_adapter(tmp_path / "root" / "good", MINIMAL_CONFIG, raw_tensors(SITE))
    write_raw_adapter(tmp_path / "secret", MINIMAL_CONFIG, raw_tensors(SITE, seed=9))
    return tmp_path / "root"


@pytest.fixture
def source(root: Path) -> LocalSource:
    return LocalSource([root], max_bytes=1 << 20)


def test_an_adapter_is_read(root: Path, source: LocalSource) -> None:
    uri = source.canonical(str(root / "good"))
    weights = source.read(uri)
    assert weights.adapter.source == uri == str(root / "good")
    assert weights.adapter.sites == (SITE,)
    assert source.version(uri) == source.version(uri)


def test_all_spellings_have_one_canonical_form(root: Path, source: LocalSource) -> None:
    path = root / "a b" / "ü%41"
    spellings = [
        str(path),
        f"{path}/",
        f"//{path}",
        f"{root}/./a b//ü%41",
        f"file://{root}/a%20b/%c3%bc%2541",
        f"file://{root}/a%20b%2Fü%2541/",
    ]
    assert {source.canonical(uri) for uri in spellings} == {str(path)}
    assert source.canonical(source.canonical(str(path))) == str(path)


def test_a_root_may_be_a_link_itself(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    source = LocalSource([tmp_path / "link"], max_bytes=1 << 20)
    assert source.canonical(str(tmp_path / "link" / "good")) == str(root / "good")
    assert source.canonical(str(root / "good")) == str(root / "good")
    assert source.read(source.canonical(str(tmp_path / "link" / "good"))).adapter.sites == (SITE,)


def test_a_root_may_be_an_adapter_and_roots_may_nest(root: Path) -> None:
    source = LocalSource([root, root / "good"], max_bytes=1 << 20)
    assert source.read(source.canonical(str(root / "good"))).adapter.sites == (SITE,)


def test_of_nested_roots_the_innermost_counts(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "secret")
    for roots in ([root, root / "link"], [root / "link", root]):
        source = LocalSource(roots, max_bytes=1 << 20)
        assert source.canonical(str(root / "link")) == str(root.parent / "secret")
        assert source.read(str(root / "link")).adapter.sites == (SITE,)


DENIED: list[Callable[[Path], str]] = [
    lambda root: str(root.parent / "secret"),
    lambda root: f"{root}/../secret",
    lambda root: f"{root}/good/..",
    lambda root: f"file://{root}/%2e%2e/secret",
    lambda root: f"file://{root}/good%2F..%2F..%2Fsecret",
    lambda root: f"{root}-other",
    lambda root: "good",
    lambda root: "./good",
    lambda root: "",
    lambda root: "/",
    lambda root: "~/good",
    lambda root: f"file:{root}/good",
    lambda root: f"file://localhost{root}/good",
    lambda root: f"file://{root}/good?x=1",
    lambda root: f"file://{root}/good#x",
    lambda root: f"file://{root}/%zz",
    lambda root: f"file://{root}/%ff",
    lambda root: f"file://{root}/good%00",
    lambda root: f"file://{root}/good%0a",
    lambda root: f"{root}/good\0",
    lambda root: f"{root}/good\n",
    lambda root: f"{root}/\udcff",
    lambda root: f"file://{root}/\udcff",
    lambda root: f"{root}/{'a' * 5000}",
    lambda root: "hf://org/repo@main",
    lambda root: "s3://bucket/prefix",
    lambda root: "https://example.com/adapter",
    lambda root: "data:text/plain,x",
]


@pytest.mark.parametrize("uri", DENIED)
def test_what_is_not_beneath_a_root_is_denied(uri: Callable[[Path], str], root: Path, source: LocalSource) -> None:
    for call in (source.canonical, source.version, source.read):
        with pytest.raises(SourceDenied) as caught:
            call(uri(root))
        assert caught.value.field == "source"
        assert caught.value.facts["wanted"]


def test_without_roots_all_is_denied(root: Path) -> None:
    with pytest.raises(SourceDenied, match="--root"):
        LocalSource([], max_bytes=1).canonical(str(root / "good"))


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


def no_folder(root: Path) -> Path:
    return root / "missing" / "deeper"


def a_file(root: Path) -> Path:
    return root / "good" / CONFIG_FILE


def beneath_a_file(root: Path) -> Path:
    return root / "good" / CONFIG_FILE / "deeper"


def long_name(root: Path) -> Path:
    return root / ("a" * 300)


def no_config(root: Path) -> Path:
    (root / "good" / CONFIG_FILE).unlink()
    return root / "good"


def no_weights(root: Path) -> Path:
    (root / "good" / WEIGHTS_FILE).rename(root / "good" / "model.safetensors")
    return root / "good"


def pickled(root: Path) -> Path:
    (root / "good" / WEIGHTS_FILE).rename(root / "good" / "adapter_model.bin")
    return root / "good"


def sharded(root: Path) -> Path:
    (root / "good" / WEIGHTS_FILE).unlink()
    (root / "good" / f"{WEIGHTS_FILE}.index.json").write_text("{}")
    return root / "good"


def large_config(root: Path) -> Path:
    (root / "good" / CONFIG_FILE).write_bytes(b" " * ((1 << 20) + 1))
    return root / "good"


def large_weights(root: Path) -> Path:
    os.truncate(root / "good" / WEIGHTS_FILE, 1 << 40)
    return root / "good"


@pytest.mark.parametrize(
    ("arrange", "error", "named"),
    [
        (no_folder, SourceUnavailable, "missing"),
        (long_name, SourceUnavailable, "aaa"),
        (a_file, AdapterInvalid, CONFIG_FILE),
        (beneath_a_file, AdapterInvalid, CONFIG_FILE),
        (no_config, AdapterInvalid, CONFIG_FILE),
        (no_weights, AdapterInvalid, WEIGHTS_FILE),
        (pickled, AdapterUnsupported, CONVERT_COMMAND),
        (sharded, AdapterUnsupported, f"{WEIGHTS_FILE}.index.json"),
        (large_config, AdapterInvalid, CONFIG_FILE),
        (large_weights, CapacityExceeded, WEIGHTS_FILE),
    ],
)
def test_what_cannot_be_read_says_why(
    arrange: Callable[[Path], Path], error: type[SlotcarError], named: str, root: Path, source: LocalSource
) -> None:
    uri = source.canonical(str(arrange(root)))
    with pytest.raises(error) as caught:
        source.read(uri)
    assert named in caught.value.message
    assert "found" in caught.value.facts


def test_a_folder_that_may_not_be_read(root: Path, source: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceUnavailable, match="Permission denied"):
        source.read(str(root / "good"))


def test_a_root_that_is_not_there_yet(tmp_path: Path) -> None:
    source = LocalSource([tmp_path / "later"], max_bytes=1 << 20)
    uri = source.canonical(str(tmp_path / "later" / "a"))
    with pytest.raises(SourceUnavailable, match="later"):
        source.read(uri)
    write_raw_adapter(tmp_path / "later" / "a", MINIMAL_CONFIG, raw_tensors(SITE))
    assert source.read(uri).adapter.sites == (SITE,)


def test_the_command_for_a_pickle_works(root: Path, source: LocalSource) -> None:
    folder = root / "good"
    (folder / WEIGHTS_FILE).unlink()
    torch.save(raw_tensors(SITE), folder / "adapter_model.bin")
    with pytest.raises(AdapterUnsupported) as caught:
        source.read(str(folder))
    command = shlex.split(caught.value.message.partition("run in its folder: ")[2])
    subprocess.run([sys.executable, *command[1:]], cwd=folder, check=True)
    assert source.read(str(folder)).adapter.sites == (SITE,)


def test_a_pickle_is_never_loaded(root: Path, source: LocalSource) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(root / "trapped"),)

    (root / "good" / WEIGHTS_FILE).unlink()
    for name in ("adapter_model.bin", WEIGHTS_FILE):
        torch.save({"a": Trap()}, root / "good" / name)
        with pytest.raises((AdapterInvalid, AdapterUnsupported)):
            source.read(str(root / "good"))
    assert not (root / "trapped").exists()


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
        version = dict(zip((CONFIG_FILE, WEIGHTS_FILE), folder.versions(), strict=True))[name]
        change(root / "good" / name)
        with pytest.raises(error):
            folder.read(name, version)


def test_a_file_that_is_written_while_it_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder_beneath(root, ("good",)) as folder:
        config, _ = folder.versions()
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
        config, _ = folder.versions()
        (root / "good").rename(root / "moved")
        (root / "good").symlink_to(root.parent / "secret")
        assert folder.versions()[0] == config
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
    outcomes = set()
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
