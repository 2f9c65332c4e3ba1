"""Matrices as they travel, as tensors over the same bytes, and back."""

from __future__ import annotations

import torch
from slotcar_kernels.buffers import DTYPE_NAMES, tensor_from_buffer
from torch import Tensor

from slotcar_sidecar.core.tensor import Matrix

__all__ = ["to_matrix", "to_tensor", "to_tensor_or_none"]


def to_tensor(matrix: Matrix) -> Tensor:
    return tensor_from_buffer(matrix.dtype, matrix.rows, matrix.columns, matrix.row_stride, matrix.data)


def to_tensor_or_none(matrix: Matrix | None) -> Tensor | None:
    return None if matrix is None else to_tensor(matrix)


def to_matrix(tensor: Tensor) -> Matrix:
    """The tensor's own memory, as a matrix."""
    rows, columns = tensor.shape
    return Matrix(DTYPE_NAMES[tensor.dtype], rows, columns, columns, tensor.view(torch.uint8).flatten().numpy().data)
