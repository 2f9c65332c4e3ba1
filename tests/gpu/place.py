"""Where the kernels run: the GPU, or without one the CPU, on which Triton's interpreter runs the same checks."""

from __future__ import annotations

import torch

__all__ = ["DEVICE", "twin", "whole"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device with the same shape, strides and surroundings: all of the tensor's storage is copied."""
    copy = whole(tensor).to(DEVICE, copy=True)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All that the tensor's storage has."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
