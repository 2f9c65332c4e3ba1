"""Tensors over bytes and bytes of tensors: the one copy for server and client."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["DTYPES", "DTYPE_NAMES", "buffer_from_tensor", "tensor_from_buffer"]

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)
_INDEX = {"int32": torch.int32}  # of ids of tokens and numbers of experts
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})

# torch warns once in a process that it can't keep a tensor over bytes from being written. Here, on import, that once is
# spent, because a filter would be lost whenever a test or a caller sets filters of its own, and is not thread-safe.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def tensor_from_buffer(
    dtype_name: str, rows: int, columns: int, row_stride: int, data: bytes | bytearray | memoryview
) -> Tensor:
    """A [rows, columns] view of `data`, rows `row_stride` elements apart from its start; the bytes are not copied.

    The tensor keeps `data` alive. Over bytes that are read-only, it must never be written: torch does not prevent it.
    Bytes that are not aligned to their elements are copied. Raises ValueError when `data` is too short.
    """
    dtype = DTYPES.get(dtype_name) or _INDEX[dtype_name]
    if rows == 0:
        return torch.empty(0, columns, dtype=dtype)
    count = (rows - 1) * row_stride + columns
    if row_stride < columns or memoryview(data).nbytes < count * dtype.itemsize:
        raise ValueError(f"{memoryview(data).nbytes} bytes for {rows} x {columns}, row stride {row_stride}, {dtype}")
    flat = torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).as_strided((rows, columns), (row_stride, 1))


def buffer_from_tensor(tensor: Tensor) -> tuple[str, int, int, bytes]:
    """dtype name, rows, columns and the bytes, row after row without gaps, of a 2-D tensor on the CPU.

    Raises ValueError when it has another number of dimensions, KeyError when its dtype has no name.
    """
    if tensor.dim() != 2:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not a matrix")
    rows, columns = tensor.shape
    data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return DTYPE_NAMES[tensor.dtype], rows, columns, data
