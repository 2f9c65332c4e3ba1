"""An upload in chunks is the adapter that the same two files in a folder are, or is refused with the numbers."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from slotcar_sidecar.core.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    CapacityExceeded,
    DigestMismatch,
    RequestInvalid,
    SlotcarError,
)
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store import peft
from slotcar_sidecar.store.sizes import MAX_CONFIG_BYTES
from slotcar_sidecar.store.sources.local import LocalSource
from slotcar_sidecar.store.tensors import RawTensor
from slotcar_sidecar.store.upload import Upload
from slotcar_sidecar.store.weights import HostWeights

from tests.adapters import (
    CONFIG_FILE,
    MINIMAL_CONFIG,
    WEIGHTS_FILE,
    make_adapter,
    raw_tensors,
    tiny_llama,
    write_raw_adapter,
)

SITE = "model.layers.0.self_attn.q_proj"
KEY_A = f"base_model.model.{SITE}.lora_A.weight"
KEY_B = f"base_model.model.{SITE}.lora_B.weight"
CONFIG = json.dumps(dict(MINIMAL_CONFIG)).encode()
WEIGHTS = save(raw_tensors(SITE, features=(8, 8)))
MOST = 1 << 20


def upload(config: Sequence[bytes], weights: Sequence[bytes], wanted: Digest | None = None) -> HostWeights:
    """Declares what comes, sends it chunk by chunk, and finishes."""
    coming = Upload(sum(map(len, config)), sum(map(len, weights)), MOST)
    for chunk in config:
        coming.add_config(chunk)
    for chunk in weights:
        coming.add_weights(chunk)
    return coming.finish(wanted)


DIGEST = peft.read_peft(CONFIG, WEIGHTS, source="test").adapter.digest


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    ends = sorted(cuts)
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_is_what_the_folder_is(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", tiny_llama(), dtype=dtype, rank_pattern={"q_proj": 2}, use_rslora=True)
    wanted = LocalSource([tmp_path], MOST).read(str(folder))
    config, weights = (folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes()
    found = upload(pieces(config, [100]), [weights[start : start + 1000] for start in range(0, len(weights), 1000)])
    assert found.adapter.source == ""
    assert found.adapter == replace(wanted.adapter, source="")
    for site in wanted.adapter.sites:
        assert found.a[site].dtype == wanted.a[site].dtype == dtype
        assert torch.equal(found.a[site], wanted.a[site])
        assert torch.equal(found.b[site], wanted.b[site])


@given(
    st.lists(st.integers(0, len(CONFIG)), max_size=8),
    st.lists(st.integers(0, len(WEIGHTS)), max_size=20),
)
def test_any_split_is_the_same_adapter(config_cuts: list[int], weights_cuts: list[int]) -> None:
    assert upload(pieces(CONFIG, config_cuts), pieces(WEIGHTS, weights_cuts)).adapter.digest == DIGEST


def test_byte_by_byte() -> None:
    assert upload([bytes([byte]) for byte in CONFIG], [bytes([byte]) for byte in WEIGHTS]).adapter.digest == DIGEST


def test_empty_chunks_by_the_thousand_change_nothing() -> None:
    empty = [b""] * 5000
    assert upload([*empty, CONFIG, *empty], [*empty, WEIGHTS, *empty]).adapter.digest == DIGEST


def test_the_digest_that_is_wanted() -> None:
    assert upload([CONFIG], [WEIGHTS], DIGEST).adapter.digest == DIGEST
    other = Digest(f"sha256:{0:064}")
    with pytest.raises(DigestMismatch) as caught:
        upload([CONFIG], [WEIGHTS], other)
    assert (caught.value.facts["found"], caught.value.facts["wanted"]) == (str(DIGEST), str(other))


@pytest.mark.parametrize(
    ("config_bytes", "weights_bytes", "file", "found", "most"),
    [
        (MAX_CONFIG_BYTES + 1, 10, CONFIG_FILE, MAX_CONFIG_BYTES + 1, MAX_CONFIG_BYTES),
        (10, MOST + 1, WEIGHTS_FILE, MOST + 1, MOST),
        (10, (1 << 64) - 1, WEIGHTS_FILE, (1 << 64) - 1, MOST),
        ((1 << 64) - 1, (1 << 64) - 1, CONFIG_FILE, (1 << 64) - 1, MAX_CONFIG_BYTES),
    ],
)
def test_what_is_too_large_is_refused_before_it_comes(
    config_bytes: int, weights_bytes: int, file: str, found: int, most: int
) -> None:
    with pytest.raises(CapacityExceeded) as caught:
        Upload(config_bytes, weights_bytes, MOST)
    assert caught.value.facts == {"file": file, "found": str(found), "wanted": f"at most {most}"}


def test_what_is_just_not_too_large() -> None:
    Upload(MAX_CONFIG_BYTES, MOST, MOST)


@pytest.mark.parametrize(("config_bytes", "weights_bytes", "name"), [(0, 9, "config"), (9, 0, "weights")])
def test_a_file_of_no_bytes_is_refused_before_it_comes(config_bytes: int, weights_bytes: int, name: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        Upload(config_bytes, weights_bytes, MOST)
    assert (caught.value.field, caught.value.facts["found"]) == (f"header.{name}_bytes", "0")


def config_after_weights(coming: Upload) -> None:
    coming.add_config(CONFIG)
    coming.add_weights(WEIGHTS[:1])
    coming.add_config(b"")


def config_after_empty_weights(coming: Upload) -> None:
    coming.add_config(CONFIG)
    coming.add_weights(b"")
    coming.add_config(b"")


def weights_before_config(coming: Upload) -> None:
    coming.add_config(CONFIG[:-1])
    coming.add_weights(WEIGHTS)


def more_config(coming: Upload) -> None:
    coming.add_config(CONFIG)
    coming.add_config(b" ")


def more_weights(coming: Upload) -> None:
    coming.add_config(CONFIG)
    coming.add_weights(WEIGHTS[:-1])
    coming.add_weights(WEIGHTS[:2])


def no_config(coming: Upload) -> None:
    coming.finish()


def less_weights(coming: Upload) -> None:
    coming.add_config(CONFIG)
    coming.add_weights(WEIGHTS[:-1])
    coming.finish()


def no_weights(coming: Upload) -> None:
    coming.add_config(CONFIG)
    coming.finish()


DECLARED = {
    "config": f"the {len(CONFIG)} bytes that were declared",
    "weights": f"the {len(WEIGHTS)} bytes that were declared",
}


@pytest.mark.parametrize(
    ("send", "field", "found"),
    [
        (weights_before_config, "config", f"{len(CONFIG) - 1} bytes and no more"),
        (more_config, "config", f"{len(CONFIG) + 1} bytes or more"),
        (more_weights, "weights", f"{len(WEIGHTS) + 1} bytes or more"),
        (no_config, "config", "0 bytes and no more"),
        (less_weights, "weights", f"{len(WEIGHTS) - 1} bytes and no more"),
        (no_weights, "weights", "0 bytes and no more"),
    ],
)
def test_another_number_of_bytes_than_was_declared(send: Callable[[Upload], None], field: str, found: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        send(Upload(len(CONFIG), len(WEIGHTS), MOST))
    assert caught.value.field == field
    assert caught.value.facts == {"field": field, "found": found, "wanted": DECLARED[field]}


@pytest.mark.parametrize("send", [config_after_weights, config_after_empty_weights])
def test_configuration_after_weights(send: Callable[[Upload], None]) -> None:
    with pytest.raises(RequestInvalid, match="a part after weights") as caught:
        send(Upload(len(CONFIG), len(WEIGHTS), MOST))
    assert caught.value.field == "config"


NAN = torch.ones(4, 8)
NAN[3, 7] = float("nan")


def tensors(**changes: torch.Tensor) -> bytes:
    data: bytes = save(raw_tensors(SITE, features=(8, 8)) | changes)
    return data


HOSTILE: dict[str, tuple[bytes, bytes]] = {
    "NaN": (CONFIG, tensors(**{KEY_A: NAN})),
    "one dimension": (CONFIG, tensors(**{KEY_A: torch.ones(4)})),
    "ranks that differ": (CONFIG, tensors(**{KEY_B: torch.ones(8, 5)})),
    "a foreign tensor": (CONFIG, tensors(whatever=torch.ones(2, 2))),
    "another rank than the configuration's": (b'{"peft_type": "LORA", "r": 5, "lora_alpha": 8}', WEIGHTS),
    "DoRA": (json.dumps(dict(MINIMAL_CONFIG) | {"use_dora": True}).encode(), WEIGHTS),
    "another type": (b'{"peft_type": "LOHA", "r": 4}', WEIGHTS),
    "no JSON": (b"{", WEIGHTS),
    "nesting": (b"[" * 200_000, WEIGHTS),
    "a pickle": (CONFIG, pickle.dumps({"a": [1.0]})),
    "one byte": (CONFIG, b"\0"),
    "data cut": (CONFIG, WEIGHTS[:-1]),
    "the files the wrong way round": (WEIGHTS, CONFIG),
}


def refusal(call: Callable[[], object]) -> SlotcarError:
    with pytest.raises((AdapterInvalid, AdapterUnsupported)) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_folder_is_refused_for_it_is_refused_for(case: str, tmp_path: Path) -> None:
    config, weights = HOSTILE[case]
    write_raw_adapter(tmp_path / "a", config, weights)
    wanted = refusal(lambda: LocalSource([tmp_path], MOST).read(str(tmp_path / "a")))
    found = refusal(lambda: upload([config], [weights]))
    assert (type(found), found.message, found.facts) == (type(wanted), wanted.message, wanted.facts)
    assert found.facts["file"] in (CONFIG_FILE, WEIGHTS_FILE)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"a": Trap()}, tmp_path / "zip")
    for data in ((tmp_path / "zip").read_bytes(), pickle.dumps(Trap())):
        refusal(partial(upload, [CONFIG], [data]))
        refusal(partial(upload, [data], [WEIGHTS]))
    assert not (tmp_path / "trapped").exists()


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_memory_grows_with_what_came_and_not_with_what_was_declared() -> None:
    coming = Upload(10, 1 << 40, 1 << 41)
    coming.add_config(b" " * 10)
    chunk = b"\0" * 7
    for _ in range(100_000):
        coming.add_weights(chunk)
    assert tracemalloc.get_traced_memory()[1] < 2 * 700_000


def from_upload(root: Path) -> HostWeights:
    config, weights = (root / "a" / CONFIG_FILE, root / "a" / WEIGHTS_FILE)
    coming = Upload(config.stat().st_size, weights.stat().st_size, 1 << 30)
    coming.add_config(config.read_bytes())
    with weights.open("rb") as file:
        while chunk := file.read(1 << 16):
            coming.add_weights(chunk)
    return coming.finish()


def from_folder(root: Path) -> HostWeights:
    return LocalSource([root], 1 << 30).read(str(root / "a"))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("read", [from_upload, from_folder])
def test_the_bytes_are_gone_while_the_tensors_are_verified(
    read: Callable[[Path], HostWeights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies are there for no longer than the copying takes; that of the tensors is pages, which are not traced."""
    held: list[int] = []
    is_finite = RawTensor.is_finite

    def measured(tensor: RawTensor) -> bool:
        held.append(tracemalloc.get_traced_memory()[0])
        return is_finite(tensor)

    write_raw_adapter(tmp_path / "a", MINIMAL_CONFIG, raw_tensors(SITE, features=(1 << 16, 1 << 16)))
    monkeypatch.setattr(RawTensor, "is_finite", measured)
    before = tracemalloc.get_traced_memory()[0]
    size = read(tmp_path).adapter.bytes
    assert held[0] - before < 0.5 * size
