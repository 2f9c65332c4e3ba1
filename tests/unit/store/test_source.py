"""Adapters come from beneath the allowed roots only, and what cannot be read says why."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
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
from slotcar_sidecar.store.sources.folder import CONVERT_COMMAND
from slotcar_sidecar.store.sources.local import LocalSource

from tests.adapters import CONFIG_FILE, MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter

SITE = "model.layers.0.self_attn.q_proj"


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
        assert caught.value.field is None, "the request that named it, if one did, says so"
        assert caught.value.facts["wanted"]


def test_without_roots_all_is_denied(root: Path) -> None:
    with pytest.raises(SourceDenied, match="--root"):
        LocalSource([], max_bytes=1).canonical(str(root / "good"))


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
    (root / "good" / f"{WEIGHTS_FILE}.index.json").write_text('{"weight_map": []}')
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
        (sharded, AdapterInvalid, f"{WEIGHTS_FILE}.index.json"),
        (large_config, CapacityExceeded, CONFIG_FILE),
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
