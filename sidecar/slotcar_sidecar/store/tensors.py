"""Reads the tensors of a safetensors file that is already in private memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, deserialize

from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.store.faults import invalid, shown
from slotcar_sidecar.store.strict_json import parse_object

MAX_HEADER_BYTES = 8 << 20
LENGTH_BYTES = 8

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
    """A tensor as the file has it; `data` is memory of its own."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray

    def to_torch(self) -> torch.Tensor:
        """The tensor over the same memory; `dtype` must be in FLOATS, and the shape not empty."""
        return torch.frombuffer(self.data, dtype=FLOATS[self.dtype].torch).reshape(self.shape)

    def is_finite(self) -> bool:
        """Whether no element is NaN or Inf; `dtype` must be in FLOATS.

        On this thread alone: torch would take cores from the Forwards that run beside a load.
        """
        kind = FLOATS[self.dtype]
        bits = np.frombuffer(self.data, dtype=kind.bits)
        return not bool(((bits & kind.exponent) == kind.exponent).any())


def read_tensors(data: bytes, file: str) -> dict[str, RawTensor]:
    """Every tensor in `data`, copied, by its key. Raises AdapterInvalid, naming `file`."""
    end = LENGTH_BYTES + header_bytes(data[:LENGTH_BYTES], len(data), file)
    # The library lets the last of two equal keys win.
    header = parse_object(data[LENGTH_BYTES:end], file, "the header of ")
    try:
        views: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise _damage(header, len(data) - end, file, str(error)) from error
    tensors = {name: RawTensor(view["dtype"], tuple(view["shape"]), view["data"]) for name, view in views}
    for name, tensor in tensors.items():
        _check_covers(name, tensor, file)
    return tensors


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


def _damage(header: Mapping[str, Any], found: int, file: str, said: str) -> AdapterInvalid:
    """Why the library refused a file with `found` bytes after its header."""
    wanted = _data_bytes(header)
    if wanted is None or wanted == found:
        return invalid(f"{file} is damaged: {shown(said)}", file=file, found=said, wanted="a safetensors file")
    why = "it is cut short" if found < wanted else "it has bytes that are no tensor's"
    return invalid(
        f"{file} has {found} bytes after its header, which says {wanted}: {why}",
        file=file,
        found=f"{found} bytes after the header",
        wanted=f"{wanted} bytes",
    )


def _data_bytes(header: Mapping[str, Any]) -> int | None:
    """Where the last tensor ends by the header, or None if that cannot be told."""
    ends = [0]
    for name, entry in header.items():
        if name != "__metadata__":
            match entry:
                case {"data_offsets": [_, int(end)]}:
                    ends.append(end)
                case _:
                    return None
    return max(ends)


def _check_covers(name: str, tensor: RawTensor, file: str) -> None:
    """Guards `to_torch` against a library that would let through what the format forbids."""
    kind = FLOATS.get(tensor.dtype)
    if kind is not None and math.prod(tensor.shape) * kind.torch.itemsize != len(tensor.data):
        raise invalid(
            f"{shown(name)} has {len(tensor.data)} bytes for the shape {list(tensor.shape)}",
            file=file,
            tensor=name,
            found=f"{len(tensor.data)} bytes",
            wanted="as many as its shape needs",
        )
