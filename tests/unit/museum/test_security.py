"""Faults by which a name, a path or a file reaches what it must not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from slotcar.v1 import adapter_service_pb2 as pb
from slotcar_sidecar.core.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    RequestInvalid,
    SourceDenied,
    SourceUnavailable,
)
from slotcar_sidecar.core.ids import AdapterName
from slotcar_sidecar.rpc.convert import to_upload_call
from slotcar_sidecar.store.sources.local import LocalSource

from tests.adapters import MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter
from tests.fakes.parts import make_bench
from tests.fakes.steps import loaded, ref
from tests.unit.museum.shared import Q, uploaded, weights_file

ESCAPES = ("../a", "/etc/passwd", "a/../b", "a/..", "a//b", ".", "a/.", "a\n", "", "~a")


def harm(marker: Path) -> bytes:
    """A pickle that makes the file `marker` when it is read."""

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (marker,))

    return pickle.dumps(Harm())


def test_no_name_and_no_source_leads_outside(tmp_path: Path) -> None:
    """vllm#46287. Neither `..` nor an absolute path nor a link reaches what is not beneath the root.

    To see it fail: give LocalSource._locate no answer but the root and the path, and follow links in Folder.version.
    """
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_raw_adapter(outside / "a", MINIMAL_CONFIG, raw_tensors(Q))
    write_raw_adapter(root / "b", MINIMAL_CONFIG, raw_tensors(Q))
    (root / "link").symlink_to(outside)
    (root / "b2").mkdir()
    (root / "b2" / WEIGHTS_FILE).symlink_to(outside / "a" / WEIGHTS_FILE)
    (root / "b2" / "adapter_config.json").symlink_to(outside / "a" / "adapter_config.json")
    source = LocalSource([root], 1 << 30)
    spellings = [f"{root}/{path}" for path in ("../outside/a", "link/a", "b/../../outside/a", "b2")]
    for uri in (*spellings, f"file://{root}/%2e%2e/outside/a", str(outside / "a"), "b"):
        with pytest.raises(SourceDenied):
            source.read(uri)
    source.read(str(root / "b"))
    for name in ESCAPES:
        with pytest.raises(RequestInvalid):
            AdapterName(name)


@pytest.mark.parametrize("name", ESCAPES)
def test_no_name_of_an_upload_leads_outside(name: str) -> None:
    """vllm#46287. The name of what is uploaded is checked before a byte of it is taken.

    To see it fail: leave the parts of the name out of AdapterName.__post_init__.
    """
    with pytest.raises(RequestInvalid) as caught:
        to_upload_call(pb.UploadHeader(ref=name, config_bytes=1, weights_bytes=1))
    assert caught.value.field == "header.ref"


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    """TensorRT-LLM#13391. A pickle is refused, under its own name and under that of a safetensors file.

    To see it fail: unpickle what is no safetensors file in read_tensors.
    """
    marker = tmp_path / "ran"
    folder = write_raw_adapter(tmp_path / "a", MINIMAL_CONFIG, None)
    (folder / "adapter_model.bin").write_bytes(harm(marker))
    with pytest.raises(AdapterUnsupported, match="pickle"):
        LocalSource([tmp_path], 1 << 30).read(str(folder))
    (folder / WEIGHTS_FILE).write_bytes(harm(marker))
    with pytest.raises(AdapterInvalid):
        LocalSource([tmp_path], 1 << 30).read(str(folder))
    assert not marker.exists()


async def test_a_pickle_in_an_upload_runs_nothing(tmp_path: Path) -> None:
    """TensorRT-LLM#13391. Nor does one that a caller sends, in place of either file.

    To see it fail: unpickle what is no safetensors file in read_tensors.
    """
    bench, marker = make_bench(1), tmp_path / "ran"
    layout = bench.cache.layout
    with pytest.raises(AdapterInvalid, match="pickle"):
        await uploaded(bench, "a", harm(marker))
    with pytest.raises(AdapterInvalid):
        await uploaded(bench, "a", weights_file(1), config=harm(marker))
    assert not marker.exists()
    assert bench.cache.layout is layout
    assert not len(bench.cache.residency.names)


def test_a_path_that_does_not_exist_is_no_download(tmp_path: Path) -> None:
    """vllm (by reading). What is not there is unavailable, and what is no path is denied.

    To see it fail: hand what is no folder to a hub's client in LocalSource.read.
    """
    source = LocalSource([tmp_path], 1 << 30)
    with pytest.raises(SourceUnavailable):
        source.read(str(tmp_path / "org" / "model"))
    for uri in ("org/model", "hf://org/model", "https://example.invalid/a", "s3://bucket/a"):
        with pytest.raises(SourceDenied):
            source.read(uri)


async def test_an_unload_deletes_no_file() -> None:
    """kubeai (by reading). No path is built from a name, and a source has no way to delete.

    To see it fail: give LocalSource a way to delete.
    """
    bench = make_bench(1)
    await loaded(bench, "a", "a")
    bench.cache.unload(ref("a"), force=True)
    with pytest.raises(RequestInvalid):
        ref("../../adapters/a")
    assert bench.source.contents == {"/a": "a"}
    assert {name for name in dir(LocalSource) if not name.startswith("_")} == {
        "canonical",
        "is_remote",
        "read",
        "version",
    }
