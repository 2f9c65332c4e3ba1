"""Whether this process can compute on a GPU, without asking it to."""

from __future__ import annotations

from importlib.util import find_spec

import torch

__all__ = ["why_no_gpu"]


def why_no_gpu(max_rank: int) -> str:
    """Why slots of this rank cannot be on a GPU here, or nothing."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    from slotcar_kernels.triton.tiles import MAX_RANK  # which needs Triton

    return f"its kernels take ranks up to {MAX_RANK}, not {max_rank}" if max_rank > MAX_RANK else ""
