"""A weights file is read as its format says; one that is cut short, or of another kind, is refused with the numbers."""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.store.tensors import FLOATS, MAX_HEADER_BYTES, RawTensor, read_tensors

GOOD = save({"a": torch.ones(2, 3), "b": torch.ones(5)}, metadata={"format": "pt"})
HEADER = struct.unpack("<Q", GOOD[:8])[0]
DATA = 44


def header_of(size: int) -> bytes:
    return struct.pack("<Q", size)


def zipped() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    return buffer.getvalue()


# The file, its message behind the name, and the facts found and wanted.
CASES: dict[str, tuple[bytes, str, str, str]] = {
    "empty": (b"", "is empty", "0 bytes", "more than 8 bytes"),
    "7 bytes": (GOOD[:7], "has only 7 bytes: it is cut short", "7 bytes", "more than 8 bytes"),
    "no header": (
        GOOD[:8],
        f"has 8 bytes, its header alone needs {8 + HEADER}: it is cut short",
        "8 bytes",
        f"at least {8 + HEADER} bytes",
    ),
    "header cut in the middle": (
        GOOD[: 8 + HEADER // 2],
        f"has {8 + HEADER // 2} bytes, its header alone needs {8 + HEADER}: it is cut short",
        f"{8 + HEADER // 2} bytes",
        f"at least {8 + HEADER} bytes",
    ),
    "header far beyond the end": (
        header_of(1 << 40) + b"{}",
        f"is no safetensors file: by its first 8 bytes, its header would have {1 << 40} bytes",
        f"a header of {1 << 40} bytes",
        "a safetensors file",
    ),
    "header of no bytes": (
        header_of(0) + GOOD[8:],
        f"has a header of 0 bytes, wanted 1 to {MAX_HEADER_BYTES}",
        "0 bytes",
        f"1 to {MAX_HEADER_BYTES} bytes",
    ),
    "header above the limit": (
        header_of(MAX_HEADER_BYTES + 1) + b"{}" + b" " * MAX_HEADER_BYTES,
        f"has a header of {MAX_HEADER_BYTES + 1} bytes, wanted 1 to {MAX_HEADER_BYTES}",
        f"{MAX_HEADER_BYTES + 1} bytes",
        f"1 to {MAX_HEADER_BYTES} bytes",
    ),
    "no data": (
        GOOD[: 8 + HEADER],
        f"has 0 bytes after its header, which says {DATA}: it is cut short",
        "0 bytes after the header",
        f"{DATA} bytes",
    ),
    "data cut": (
        GOOD[:-1],
        f"has {DATA - 1} bytes after its header, which says {DATA}: it is cut short",
        f"{DATA - 1} bytes after the header",
        f"{DATA} bytes",
    ),
    "data too long": (
        GOOD + b"\0" * 4,
        f"has {DATA + 4} bytes after its header, which says {DATA}: it has bytes that are no tensor's",
        f"{DATA + 4} bytes after the header",
        f"{DATA} bytes",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_cut_or_too_long_says_by_how_much(case: str) -> None:
    data, message, found, wanted = CASES[case]
    with pytest.raises(AdapterInvalid) as caught:
        read_tensors(data, "file")
    assert caught.value.message == f"file {message}"
    assert caught.value.facts == {"file": "file", "found": found, "wanted": wanted}


OTHER_KINDS: list[tuple[Callable[[], bytes], str]] = [
    (zipped, "zip archive"),
    *[(lambda protocol=protocol: pickle.dumps({"a": [1.0] * 9}, protocol), "pickle") for protocol in range(2, 6)],
    (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4096\n", "Git LFS pointer"),
    (lambda: b"<!DOCTYPE html><html>404</html>", "page of HTML"),
]


@pytest.mark.parametrize(("make", "kind"), OTHER_KINDS)
def test_another_kind_of_file_is_named(make: Callable[[], bytes], kind: str) -> None:
    with pytest.raises(AdapterInvalid, match=f"^file is a {kind}") as caught:
        read_tensors(make(), "file")
    assert caught.value.facts["wanted"] == "a safetensors file"


def test_what_is_no_json_is_said_of_the_header() -> None:
    with pytest.raises(AdapterInvalid, match=r"^the header of file is not JSON"):
        read_tensors(header_of(HEADER // 2) + GOOD[8:], "file")


def with_header(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return header_of(len(text)) + text + body


def entry(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# What the header says, for 8 bytes of data.
DAMAGED: dict[str, dict[str, Any]] = {
    "no entry": {"a": 1},
    "one offset": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8]}},
    "offsets of text": {"a": entry("F32", [2], "0", "8")},
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
    "a shape of another size": {"a": entry("F32", [3], 0, 8)},
    "a negative dimension": {"a": entry("F32", [-2], 0, 8)},
    "a broken dimension": {"a": entry("F32", [2.0], 0, 8)},
    "true for one": {"a": entry("F32", [True, 2], 0, 8)},
    "an end before the start": {"a": entry("I8", [1], 8, 4), "b": entry("F32", [2], 0, 8)},
    "a gap": {"a": entry("F16", [1], 0, 2), "b": entry("F32", [1], 4, 8)},
    "a gap at the start": {"a": entry("F32", [1], 4, 8)},
    "bytes of two": {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)},
    "metadata that is no map": {"a": entry("F32", [2], 0, 8), "__metadata__": [1]},
    "metadata that is no text": {"a": entry("F32", [2], 0, 8), "__metadata__": {"format": 1}},
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_the_format_forbids_is_damage(case: str) -> None:
    with pytest.raises(AdapterInvalid, match=r"^file is damaged: ") as caught:
        read_tensors(with_header(DAMAGED[case], bytes(8)), "file")
    assert caught.value.facts["wanted"] == "a safetensors file"
    with pytest.raises(SafetensorError):
        deserialize(with_header(DAMAGED[case], bytes(8)))


def test_a_field_that_is_not_known_could_change_what_the_tensor_means() -> None:
    with pytest.raises(AdapterInvalid, match=r"^file is damaged: .*strides"):
        read_tensors(with_header({"a": entry("F32", [2], 0, 8) | {"strides": [1]}}, bytes(8)), "file")


numbers = st.integers(-1, 9) | st.sampled_from([12, 16, 24, 1 << 40, True, 1.0])
entries = st.builds(entry, st.sampled_from(["F32", "F16", "BF16"]), st.lists(numbers, max_size=2), numbers, numbers)
neighbours = st.lists(st.tuples(st.sampled_from(["F32", "F16", "BF16"]), st.integers(0, 3)), max_size=4)


@settings(max_examples=300)
@given(header=st.dictionaries(st.text(max_size=3), entries, max_size=3), size=st.integers(0, 24))
def test_no_file_is_taken_that_the_library_refuses(header: dict[str, Any], size: int) -> None:
    data = with_header(header, bytes(range(size)))
    with suppress(AdapterInvalid):
        assert_same(read_tensors(data, "file"), deserialize(data))


@settings(max_examples=100)
@given(neighbours)
def test_a_file_that_the_library_takes_is_taken_alike(tensors: list[tuple[str, int]]) -> None:
    header, end = {}, 0
    for number, (dtype, count) in enumerate(tensors):
        start, end = end, end + count * {"F32": 4}.get(dtype, 2)
        header[str(number)] = entry(dtype, [count], start, end)
    data = with_header(header, bytes(range(end)))
    assert_same(read_tensors(data, "file"), deserialize(data))


def assert_same(found: Mapping[str, RawTensor], wanted: list[tuple[str, dict[str, Any]]]) -> None:
    assert {name: (raw.dtype, list(raw.shape), bytes(raw.data)) for name, raw in found.items()} == {
        name: (view["dtype"], view["shape"], bytes(view["data"])) for name, view in wanted
    }


def test_tensors_stay_where_the_file_is_read() -> None:
    memory = memoryview(bytearray(save({"a": torch.ones(64, 64), "b": torch.ones(5)})))
    tensors = {name: raw.to_torch() for name, raw in read_tensors(memory, "file").items()}
    memory[-1] = 0
    assert not torch.equal(tensors["b"], torch.ones(5))
    assert torch.equal(tensors["a"], torch.ones(64, 64))


@pytest.mark.parametrize(
    "data",
    [
        save({"a": torch.ones(64, 64)}),
        memoryview(save({"a": torch.ones(64, 64)})),
        memoryview(bytearray(save({"a": torch.ones(64, 64)}, metadata={"x": "y" * 4096}))),
    ],
    ids=["bytes", "read-only", "a large header"],
)
def test_bytes_and_what_has_a_large_header_are_copied(data: bytes | memoryview) -> None:
    (raw,) = read_tensors(data, "file").values()
    assert not raw.data.readonly
    raw.data[0] = 7
    assert bytes(data).count(7) == 0


def test_a_tensor_that_begins_between_words_is_copied() -> None:
    header = {"half": entry("F16", [1], 0, 2), "whole": entry("F32", [2], 2, 10)}
    body = torch.tensor([1.0]).half().numpy().tobytes() + torch.tensor([2.0, 3.0]).numpy().tobytes()
    for padding in range(4):
        data = with_header(header | {"__metadata__": {"x": "y" * padding}}, body)
        tensors = read_tensors(data, "file")
        assert tensors["whole"].to_torch().tolist() == [2.0, 3.0]
        assert tensors["half"].to_torch().tolist() == [1.0]
        assert tensors["whole"].is_finite()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, (1 << 18) - 1, 1 << 18, (1 << 18) + 4])
def test_one_value_that_is_not_finite_is_found(dtype: str, value: float, at: int) -> None:
    values = torch.full(((1 << 18) + 5,), torch.finfo(FLOATS[dtype].torch).max, dtype=FLOATS[dtype].torch)

    def raw() -> RawTensor:
        return RawTensor(dtype, tuple(values.shape), memoryview(values.view(torch.uint8).numpy()))

    assert raw().is_finite()
    values[at] = value
    assert not raw().is_finite()
