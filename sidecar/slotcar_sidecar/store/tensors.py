"""Reads the tensors of a safetensors file that is already in private memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, deserialize

from slotcar_sidecar.store.faults import invalid, shown
from slotcar_sidecar.store.strict_json import parse_object

MAX_HEADER_BYTES = 8 << 20
LENGTH_BYTES = 8
FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as the file has it; `data` is memory of its own."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray

    def to_torch(self) -> torch.Tensor:
        """The tensor over the same memory; `dtype` must be in FLOATS, and the shape not empty."""
        return torch.frombuffer(self.data, dtype=FLOATS[self.dtype]).reshape(self.shape)


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
    size = {"F32": 4, "F16": 2, "BF16": 2}.get(tensor.dtype)
    if size is not None and math.prod(tensor.shape) * size != len(tensor.data):
        raise invalid(
            f"{shown(name)} has {len(tensor.data)} bytes for the shape {list(tensor.shape)}",
            file=file,
            tensor=name,
            found=f"{len(tensor.data)} bytes",
            wanted="as many as its shape needs",
        )
