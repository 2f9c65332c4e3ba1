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

from slotcar_sidecar.store.faults import invalid, shown
from slotcar_sidecar.store.strict_json import parse_object

MAX_HEADER_BYTES = 8 << 20
LENGTH_BYTES = 8


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
    parse_object(data[LENGTH_BYTES:end], file)
    try:
        views: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        text = shown(str(error))
        raise invalid(f"{file} is damaged: {text}", file=file, found=text, wanted="a safetensors file") from error
    tensors = {name: RawTensor(view["dtype"], tuple(view["shape"]), view["data"]) for name, view in views}
    for name, tensor in tensors.items():
        _check_covers(name, tensor, file)
    return tensors


def header_bytes(start: bytes, file_bytes: int, file: str) -> int:
    """Length of the header that `start`, the first 8 bytes, announces. Raises AdapterInvalid, naming `file`."""
    most = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    found = int.from_bytes(start, "little") if len(start) == LENGTH_BYTES else -1
    if not 0 < found <= most:
        what = f"{found} bytes" if found >= 0 else f"{file_bytes} bytes in all"
        raise invalid(
            f"{file} has a truncated or oversized header: {what}",
            file=file,
            found=what,
            wanted=f"1 to {max(most, 1)} bytes",
        )
    return found


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
