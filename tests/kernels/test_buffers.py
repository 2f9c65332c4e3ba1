"""Tensors over bytes and bytes of tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from slotcar_kernels.buffers import DTYPE_NAMES, DTYPES, buffer_from_tensor, tensor_from_buffer

from tests.tolerances import assert_same_bits

NAMES = sorted(DTYPES)


def matrix(name: str, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(DTYPES[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 64), (0, 8)], ids=str)
def test_round_trip(name: str, shape: tuple[int, int]) -> None:
    tensor = matrix(name, *shape)
    dtype, rows, columns, data = buffer_from_tensor(tensor)
    assert (dtype, rows, columns, len(data)) == (name, *shape, tensor.nbytes)
    assert_same_bits(tensor_from_buffer(dtype, rows, columns, columns, data), tensor)


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, 1:4], lambda t: t[::2], lambda t: t[:, ::3]])
def test_a_view_gives_its_own_bytes_row_after_row(view) -> None:
    tensor = view(matrix("bfloat16", 6, 7))
    dtype, rows, columns, data = buffer_from_tensor(tensor)
    assert_same_bits(tensor_from_buffer(dtype, rows, columns, columns, data), tensor)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_rows_lie_row_stride_apart(kind) -> None:
    whole = matrix("float32", 4, 6)
    data = kind(buffer_from_tensor(whole)[3])
    found = tensor_from_buffer("float32", 4, 5, 6, data[: 4 * (3 * 6 + 5)])
    assert found.stride() == (6, 1)
    assert_same_bits(found, whole[:, :5])


def test_nothing_is_copied() -> None:
    data = bytearray(buffer_from_tensor(matrix("float32", 2, 3))[3])
    tensor = tensor_from_buffer("float32", 2, 3, 3, data)
    data[:4] = b"\0\0\0\0"
    assert tensor[0, 0] == 0


def test_the_tensor_keeps_the_bytes_alive() -> None:
    wanted = matrix("float32", 100, 100)
    tensor = tensor_from_buffer("float32", 100, 100, 100, memoryview(buffer_from_tensor(wanted)[3]))
    rubbish = [bytes(40_000) for _ in range(20)]
    assert_same_bits(tensor, wanted)
    assert rubbish


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_bytes_that_are_not_aligned(name: str, offset: int) -> None:
    wanted = matrix(name, 3, 5)
    data = memoryview(bytes(offset) + buffer_from_tensor(wanted)[3])[offset:]
    found = tensor_from_buffer(name, 3, 5, 5, data)
    assert found.data_ptr() % wanted.itemsize == 0
    assert_same_bits(found, wanted)


@pytest.mark.parametrize(("rows", "columns", "row_stride"), [(3, 4, 4), (2, 4, 9), (2, 2, 1)])
def test_too_few_bytes_are_refused(rows: int, columns: int, row_stride: int) -> None:
    with pytest.raises(ValueError, match="bytes for"):
        tensor_from_buffer("float32", rows, columns, row_stride, bytes(44))


def test_only_matrices_of_known_dtypes() -> None:
    with pytest.raises(ValueError, match="not a matrix"):
        buffer_from_tensor(torch.zeros(3))
    with pytest.raises(KeyError):
        buffer_from_tensor(torch.zeros(3, 3, dtype=torch.float64))
    assert {name: DTYPE_NAMES[dtype] for name, dtype in DTYPES.items()} == {name: name for name in DTYPES}


def test_a_tensor_that_requires_grad() -> None:
    assert buffer_from_tensor(torch.ones(1, 1, requires_grad=True))[3] == b"\0\0\x80?"


def test_read_only_bytes_do_not_warn() -> None:
    code = "from slotcar_kernels.buffers import tensor_from_buffer as f; f('float32', 1, 1, 1, b'1234')"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
