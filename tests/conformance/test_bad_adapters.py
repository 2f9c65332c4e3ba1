"""Adapters and sources that are broken, foreign or forbidden are refused with what, where and why; nothing changes."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save
from slotcar.v1 import adapter_service_pb2 as pb

from tests.adapters import CONFIG_FILE, MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter
from tests.conformance.refusals import Refusal, refused
from tests.conformance.target import PATIENCE_SECONDS, Target

PREFIX = "base_model.model."


class Case(NamedTuple):
    """How to break a sound adapter in its folder, and the refusal; a fact of "*" is any."""

    name: str
    spoil: Callable[[Target, Path], None]
    reason: str
    facts: dict[str, str]


def tensors(target: Target, **settings: Any) -> dict[str, torch.Tensor]:
    site = target.site
    return raw_tensors(site.name, **{"features": (site.in_features, site.out_features)} | settings)


def key(target: Target, side: str) -> str:
    return f"{PREFIX}{target.site.name}.lora_{side}.weight"


def cut(size: int) -> Callable[[Target, Path], None]:
    """Keeps the first `size` bytes of the weights, or all but the last -`size`."""

    def spoil(_: Target, folder: Path) -> None:
        path = folder / WEIGHTS_FILE
        path.write_bytes(path.read_bytes()[:size])

    return spoil


def header(length: int) -> Callable[[Target, Path], None]:
    """Says that the header has `length` bytes."""

    def spoil(_: Target, folder: Path) -> None:
        path = folder / WEIGHTS_FILE
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])

    return spoil


def element(side: str, value: float) -> Callable[[Target, Path], None]:
    def spoil(target: Target, folder: Path) -> None:
        changed = tensors(target)
        changed[key(target, side)][1, 2] = value
        write_raw_adapter(folder, None, changed)

    return spoil


def weights(change: Callable[[Target], dict[str, torch.Tensor]]) -> Callable[[Target, Path], None]:
    def spoil(target: Target, folder: Path) -> None:
        write_raw_adapter(folder, None, change(target))

    return spoil


def config(data: dict[str, Any] | bytes) -> Callable[[Target, Path], None]:
    """Sets fields, or writes other bytes."""

    def spoil(_: Target, folder: Path) -> None:
        write_raw_adapter(folder, dict(MINIMAL_CONFIG) | data if isinstance(data, dict) else data, None)

    return spoil


def remove(name: str) -> Callable[[Target, Path], None]:
    return lambda _, folder: (folder / name).unlink()


def only(name: str, data: bytes) -> Callable[[Target, Path], None]:
    """Another file in the place of the weights."""

    def spoil(_: Target, folder: Path) -> None:
        (folder / WEIGHTS_FILE).unlink()
        (folder / name).write_bytes(data)

    return spoil


class Trap:
    """A pickle that ends the process that reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os._exit, (1,))


INVALID, UNSUPPORTED = "ADAPTER_INVALID", "ADAPTER_UNSUPPORTED"
IN_WEIGHTS = {"file": WEIGHTS_FILE, "found": "*", "wanted": "*"}
IN_TENSOR = IN_WEIGHTS | {"tensor": "*"}
IN_CONFIG = {"file": CONFIG_FILE, "found": "*", "wanted": "*"}

BROKEN = [
    Case("truncated", cut(-10), INVALID, IN_WEIGHTS),
    Case("truncated-header", cut(20), INVALID, IN_WEIGHTS),
    Case("four-bytes", cut(4), INVALID, IN_WEIGHTS | {"found": "4 bytes"}),
    Case("empty-file", cut(0), INVALID, IN_WEIGHTS),
    Case("huge-header", header(1 << 60), INVALID, IN_WEIGHTS | {"found": f"a header of {1 << 60} bytes"}),
    Case("negative-header", header((1 << 64) - 1), INVALID, IN_WEIGHTS),
    Case("nan", element("A", math.nan), INVALID, IN_TENSOR | {"found": "NaN or Inf"}),
    Case("infinity", element("B", -math.inf), INVALID, IN_TENSOR | {"found": "NaN or Inf"}),
    Case(
        "two-ranks",
        weights(lambda t: tensors(t) | {key(t, "B"): torch.ones(t.site.out_features, 3)}),
        INVALID,
        IN_TENSOR,
    ),
    Case("vector", weights(lambda t: tensors(t) | {key(t, "A"): torch.ones(64)}), INVALID, IN_TENSOR),
    Case(
        "integers",
        weights(lambda t: {name: tensor.int() for name, tensor in tensors(t).items()}),
        INVALID,
        IN_TENSOR | {"found": "I32"},
    ),
    Case("one-side", weights(lambda t: {key(t, "A"): torch.ones(4, t.site.in_features)}), INVALID, IN_TENSOR),
    Case("unknown-key", weights(lambda t: tensors(t) | {"strange": torch.ones(2)}), INVALID, IN_TENSOR),
    Case("no-tensor", lambda _, folder: (folder / WEIGHTS_FILE).write_bytes(save({})) and None, INVALID, IN_WEIGHTS),
    Case("other-rank", config({"r": 5}), INVALID, IN_CONFIG | {"field": "r", "found": "4", "wanted": "5"}),
    Case("no-weights", remove(WEIGHTS_FILE), INVALID, IN_WEIGHTS | {"found": "no such file"}),
    Case("no-config", remove(CONFIG_FILE), INVALID, IN_CONFIG | {"found": "no such file"}),
    Case("no-json", config(b"{"), INVALID, IN_CONFIG | {"wanted": "JSON"}),
    Case("a-list", config(b"[]"), INVALID, IN_CONFIG | {"wanted": "an object"}),
    Case("key-twice", config(b'{"r": 4, "r": 8}'), INVALID, IN_CONFIG | {"field": "r"}),
    Case("rank-of-text", config({"r": "4"}), INVALID, IN_CONFIG | {"field": "r"}),
    Case("deep-config", config(b"[" * 100_000), INVALID, IN_CONFIG),
    Case("pickle", only("adapter_model.bin", pickle.dumps(Trap())), UNSUPPORTED, {"file": "adapter_model.bin"}),
    Case("shards", only(f"{WEIGHTS_FILE}.index.json", b"{}"), INVALID, {"file": f"{WEIGHTS_FILE}.index.json"}),
    Case("dora", config({"use_dora": True}), INVALID, {"field": "use_dora"}),
    Case("ia3", config({"peft_type": "IA3"}), UNSUPPORTED, IN_CONFIG | {"field": "peft_type"}),
    Case("unknown-field", config({"invented": 1}), UNSUPPORTED, IN_CONFIG | {"field": "invented"}),
    Case("head", weights(lambda t: tensors(t) | {f"{PREFIX}lm_head.weight": torch.ones(2, 2)}), UNSUPPORTED, IN_TENSOR),
    Case("doubles", weights(lambda t: {n: v.double() for n, v in tensors(t).items()}), UNSUPPORTED, IN_TENSOR),
]
# Sound adapters that do not fit the server.
UNFIT = [
    Case(
        "wrong-shape",
        weights(lambda t: tensors(t, features=(t.site.in_features + 1, t.site.out_features))),
        INVALID,
        {"tensor": "*", "found": "*", "wanted": "*"},
    ),
    Case(
        "wrong-site",
        weights(lambda t: raw_tensors("layers.99.q_proj")),
        INVALID,
        {"tensor": "layers.99.q_proj", "found": "*", "wanted": "*"},
    ),
    Case(
        "wrong-rank",
        lambda t, folder: t.write(folder, rank=t.server.max_rank + 1) and None,
        INVALID,
        {"tensor": "*", "field": "r", "found": "*", "wanted": "*"},
    ),
]


@pytest.fixture(scope="module")
def loaded(server: Target) -> Target:
    """The server under test with a pinned adapter, so that a change would show."""
    server.unload_all()
    server.load("loaded", keep=True)
    return server


def load(target: Target, source: str, **request: Any) -> Refusal:
    """The refusal of a load; the state is the same before and after."""
    fields = {"ref": "bad", "source": source} | request
    with target.unchanged():
        return refused(target.adapters.LoadAdapter, pb.LoadAdapterRequest(**fields), timeout=PATIENCE_SECONDS)


def estimate(target: Target, source: str) -> Refusal:
    with target.unchanged():
        return refused(
            target.adapters.EstimateAdapter, pb.EstimateAdapterRequest(source=source), timeout=PATIENCE_SECONDS
        )


def spoiled(target: Target, case: Case) -> str:
    folder = target.root / f"bad-{case.name}"
    shutil.rmtree(folder, ignore_errors=True)
    case.spoil(target, target.write(folder))
    return str(folder)


def check(refusal: Refusal, case: Case) -> None:
    assert refusal.reason == case.reason, refusal
    for name, value in case.facts.items():
        assert refusal.metadata.get(name), f"no {name} in {refusal}"
        assert value in ("*", refusal.metadata[name])
    assert refusal.fields == ()
    (subject,) = refusal.subjects
    assert subject == (refusal.metadata.get("tensor") or refusal.metadata.get("file"))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_broken_adapter_is_refused(loaded: Target, case: Case) -> None:
    source = spoiled(loaded, case)
    check(load(loaded, source), case)
    check(load(loaded, source, ref="loaded", on_conflict=pb.ON_CONFLICT_REPLACE), case)
    check(estimate(loaded, source), case)


@pytest.mark.parametrize("case", UNFIT, ids=lambda case: case.name)
def test_an_adapter_that_does_not_fit_is_refused(loaded: Target, case: Case) -> None:
    source = spoiled(loaded, case)
    check(load(loaded, source), case)
    check(load(loaded, source, ref="loaded", on_conflict=pb.ON_CONFLICT_REPLACE), case)
    request = pb.EstimateAdapterRequest(source=source)
    with loaded.unchanged():
        answer = loaded.adapters.EstimateAdapter(request, timeout=PATIENCE_SECONDS)
    assert not answer.fits
    assert answer.why_not.startswith(f"{case.reason}: ")
    assert answer.digest.startswith("sha256:")


FORBIDDEN = {
    "dots": "{root}/../{name}",
    "dots-inside": "{root}/a/../../../etc",
    "encoded-dots": "file://{root}/%2e%2e/%2e%2e/etc",
    "outside": "/etc",
    "beside": "{root}/../../outside",
    "file-outside": "file:///etc",
    "with-host": "file://elsewhere{root}/loaded",
    "two-slashes-less": "file:{root}/loaded",
    "relative": "loaded",
    "query": "file://{root}/loaded?x=1",
    "hub": "hf://org/repo@main",
    "bucket": "s3://bucket/prefix",
    "web": "https://example.com/adapter",
    "nul": "{root}/loaded\0",
    "newline": "{root}/loaded\n",
    "encoded-nul": "file://{root}/loaded%00",
    "not-utf8": "file://{root}/%ff",
    "long": "{root}/" + "x" * 5000,
    "linked-folder": "{root}/link",
    "linked-parent": "{root}/link-to-root/loaded",
    "linked-weights": "{root}/linked-weights",
    "linked-config": "{root}/linked-config",
    "weights-are-a-folder": "{root}/folder-as-weights",
}


@pytest.fixture(scope="module")
def links(loaded: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = loaded.root
    outside = loaded.write(tmp_path_factory.mktemp("outside") / "adapter")
    (root / "link").symlink_to(outside)
    (root / "link-to-root").symlink_to(root)
    for name, file in (("linked-weights", WEIGHTS_FILE), ("linked-config", CONFIG_FILE)):
        folder = loaded.write(root / name)
        (folder / file).unlink()
        (folder / file).symlink_to(outside / file)
    folder = loaded.write(root / "folder-as-weights")
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).mkdir()
    return loaded


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_source_that_is_not_allowed_is_denied(links: Target, name: str) -> None:
    source = FORBIDDEN[name].format(root=links.root, name=links.root.name)
    for refusal in (load(links, source), estimate(links, source)):
        assert refusal.reason == "SOURCE_DENIED"
        assert refusal.fields == ("source",)
        assert refusal.metadata["found"]
        assert refusal.metadata["wanted"]


def test_a_source_that_is_not_there_is_unavailable(loaded: Target) -> None:
    for refusal in (load(loaded, f"{loaded.root}/nothing"), estimate(loaded, f"{loaded.root}/nothing")):
        assert refusal.reason == "SOURCE_UNAVAILABLE"
        assert refusal.fields == ("source",)
        assert refusal.metadata == {"found": "nothing", "wanted": "an adapter's folder"}


def test_a_file_is_no_adapter(loaded: Target) -> None:
    refusal = load(loaded, f"{loaded.root}/loaded/{CONFIG_FILE}")
    assert refusal.reason == "ADAPTER_INVALID"
    assert refusal.metadata == {"file": CONFIG_FILE, "found": "a file", "wanted": "a folder"}


def test_no_source_of_an_unknown_name_is_not_found(loaded: Target) -> None:
    refusal = load(loaded, "")
    assert refusal.reason == "ADAPTER_NOT_FOUND"
    assert refusal.metadata == {"adapters": "bad"}
    refusal = estimate(loaded, "")
    assert refusal.reason == "REQUEST_INVALID"
    assert refusal.fields == ("source",)


def test_a_sound_adapter_still_loads(loaded: Target) -> None:
    """After all that was refused in this module."""
    before = loaded.state()
    for source in (str(loaded.folder("sound")), f"file://{loaded.folder('sound')}", f"{loaded.folder('sound')}/"):
        assert loaded.load("sound", source=source).adapter.name == "sound"
        request = pb.UnloadAdapterRequest(ref="sound")
        loaded.adapters.UnloadAdapter(request, timeout=PATIENCE_SECONDS)
    assert [adapter.name for adapter in loaded.state().adapters] == ["loaded"]
    assert loaded.state().adapters == before.adapters
    assert json.loads((loaded.folder("sound") / CONFIG_FILE).read_bytes())["r"] == 4
