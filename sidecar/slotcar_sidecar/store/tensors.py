"""Finds the tensors of a safetensors file in private memory, where they stay: nothing is copied that need not be.

A file is taken by the format's rules alone: every byte behind the header is in exactly one tensor, in the order of the
offsets, and has the size that dtype and shape give it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.store.faults import invalid, shown
from slotcar_sidecar.store.memory import private_memory
from slotcar_sidecar.store.strict_json import parse_object

MAX_HEADER_BYTES = 8 << 20
LENGTH_BYTES = 8

# A header that is larger than this part of a file would take memory that the host tier does not count.
_MAX_HEADER_PART = 1 / 16
_METADATA = "__metadata__"
_FINITE_RUN = 1 << 18  # elements that are looked at together: they fit in a cache

# What files begin with that are taken for weights by mistake.
_OTHER_KINDS: Mapping[bytes, str] = MappingProxyType(
    {
        b"PK\x03\x04": "a zip archive, such as torch.save writes: it may hold a pickle, which is never read",
        b"\x80": "a pickle, which is never read",
        b"version ": "a Git LFS pointer, not what it points to",
        b"<": "a page of HTML or XML",
    }
)


class Float(NamedTuple):
    """A floating-point type: its bits as an integer type, and those that are all set in NaN and Inf alone."""

    torch: torch.dtype
    bits: type[np.unsignedinteger[Any]]
    exponent: int


FLOATS: Mapping[str, Float] = MappingProxyType(
    {
        "F32": Float(torch.float32, np.uint32, 0x7F800000),
        "F16": Float(torch.float16, np.uint16, 0x7C00),
        "BF16": Float(torch.bfloat16, np.uint16, 0x7F80),
    }
)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as the file has it; `data` is its part of the file, where nobody writes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def to_torch(self) -> torch.Tensor:
        """The tensor over the same memory, or a copy where elements would lie across words.

        `dtype` must be in FLOATS, and the shape not empty.
        """
        kind, values = FLOATS[self.dtype].torch, torch.frombuffer(self.data, dtype=torch.uint8)
        if values.data_ptr() % kind.itemsize:
            values = values.clone()
        return values.view(kind).reshape(self.shape)

    def is_finite(self) -> bool:
        """Whether no element is NaN or Inf; `dtype` must be in FLOATS.

        On this thread alone: torch would take cores from the Forwards that run beside a load.
        """
        kind = FLOATS[self.dtype]
        bits = np.frombuffer(self.data, dtype=kind.bits)
        runs = (bits[start : start + _FINITE_RUN] for start in range(0, len(bits), _FINITE_RUN))
        return all((run & kind.exponent).max() < kind.exponent for run in runs)


class _Entry(NamedTuple):
    """What the header says of one tensor."""

    start: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_tensors(data: bytes | memoryview, file: str) -> dict[str, RawTensor]:
    """Every tensor in `data` by its key, in place if that is memory and not bytes.

    Raises AdapterInvalid, naming `file`.
    """
    view = memoryview(data)
    end = LENGTH_BYTES + header_bytes(bytes(view[:LENGTH_BYTES]), len(view), file)
    header = parse_object(bytes(view[LENGTH_BYTES:end]), file, "the header of ")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _damage(file, f"its {_METADATA} is not a text for each name")
    entries = sorted(_entry(name, value, file) for name, value in header.items())
    _check_order(entries, len(view) - end, file)
    body = view[end:]
    if view.readonly or end > _MAX_HEADER_PART * len(view):
        body = private_memory(len(body))
        body[:] = view[end:]
    return {name: RawTensor(dtype, shape, body[start:end]) for start, end, name, dtype, shape in entries}


def header_bytes(start: bytes, file_bytes: int, file: str) -> int:
    """Length of the header that `start`, the first 8 bytes, announces. Raises AdapterInvalid, naming `file`."""
    if file_bytes < LENGTH_BYTES:
        why = "is empty" if file_bytes == 0 else f"has only {file_bytes} bytes: it is cut short"
        raise invalid(f"{file} {why}", file=file, found=f"{file_bytes} bytes", wanted=f"more than {LENGTH_BYTES} bytes")
    found, left = int.from_bytes(start, "little"), file_bytes - LENGTH_BYTES
    if 0 < found <= min(left, MAX_HEADER_BYTES):
        return found
    if left < found <= MAX_HEADER_BYTES:
        raise invalid(
            f"{file} has {file_bytes} bytes, its header alone needs {LENGTH_BYTES + found}: it is cut short",
            file=file,
            found=f"{file_bytes} bytes",
            wanted=f"at least {LENGTH_BYTES + found} bytes",
        )
    if found > left:
        raise _another_kind(start, found, file)
    raise invalid(
        f"{file} has a header of {found} bytes, wanted 1 to {MAX_HEADER_BYTES}",
        file=file,
        found=f"{found} bytes",
        wanted=f"1 to {MAX_HEADER_BYTES} bytes",
    )


def _another_kind(start: bytes, header: int, file: str) -> AdapterInvalid:
    """What a file may be whose first 8 bytes cannot be the length of a header."""
    kind = next((kind for first, kind in _OTHER_KINDS.items() if start.startswith(first)), None)
    return invalid(
        f"{file} is {kind or f'no safetensors file: by its first 8 bytes, its header would have {header} bytes'}",
        file=file,
        found=kind or f"a header of {header} bytes",
        wanted="a safetensors file",
    )


def _entry(name: str, value: object, file: str) -> _Entry:
    """What the header says of the tensor `name`, with a size that fits dtype and shape."""
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end], **rest} if not rest and all(
            type(number) is int and number >= 0 for number in (*shape, start, end)
        ):
            kind, size = FLOATS.get(dtype), end - start
        case _:
            raise _damage(file, f"its header says of {shown(name)} {shown(json.dumps(value))}")
    if size < 0 or (kind is not None and math.prod(shape) * kind.torch.itemsize != size):
        raise _damage(file, f"{shown(name)} has {size} bytes for {dtype} of shape {shape}")
    return _Entry(start, end, name, dtype, tuple(shape))


def _check_order(entries: Sequence[_Entry], found: int, file: str) -> None:
    """Raises AdapterInvalid unless the entries, in the order of their offsets, share out `found` bytes."""
    wanted = max((entry.end for entry in entries), default=0)
    if wanted != found:
        why = "it is cut short" if found < wanted else "it has bytes that are no tensor's"
        raise invalid(
            f"{file} has {found} bytes after its header, which says {wanted}: {why}",
            file=file,
            found=f"{found} bytes after the header",
            wanted=f"{wanted} bytes",
        )
    end = 0
    for entry in entries:
        if entry.start != end:
            raise _damage(
                file, f"{shown(entry.name)} begins at byte {entry.start}, and what is before it ends at {end}"
            )
        end = entry.end


def _damage(file: str, what: str) -> AdapterInvalid:
    return invalid(f"{file} is damaged: {what}", file=file, found=what, wanted="a safetensors file")
