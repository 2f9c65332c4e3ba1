"""A weights file that is cut short, or is another kind of file, says so in one sentence with the numbers."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save
from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.store.tensors import MAX_HEADER_BYTES, read_tensors

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


def test_damage_that_has_no_count_keeps_the_librarys_words() -> None:
    header = GOOD[8 : 8 + HEADER].replace(b"[2,3]", b"[3,3]")
    with pytest.raises(AdapterInvalid, match=r"^file is damaged: "):
        read_tensors(header_of(HEADER) + header + GOOD[8 + HEADER :], "file")
    for bad in (b'{"a":1}', b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}', b'{"a":{"data_offsets":"04"}}'):
        with pytest.raises(AdapterInvalid, match=r"^file is damaged: "):
            read_tensors(header_of(len(bad)) + bad + b"\0" * 4, "file")
