"""What a device needs of host weights, and whether they can be written into its slots without loss of meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from slotcar_kernels.buffers import DTYPES
from torch import Tensor

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.core.ports import HostAdapter

__all__ = ["RANK_STEP", "HostTensors", "check_range", "host_tensors", "padded_rank"]

RANK_STEP = 16


@runtime_checkable
class HostTensors(Protocol):
    """Per targeted site A [rank, in] and B [out, rank], as in the file, without the scale."""

    @property
    def adapter(self) -> Adapter: ...
    @property
    def a(self) -> Mapping[str, Tensor]: ...
    @property
    def b(self) -> Mapping[str, Tensor]: ...


def host_tensors(weights: HostAdapter) -> HostTensors:
    """The tensors of a host adapter, with the shapes that its parts say."""
    assert isinstance(weights, HostTensors), f"{type(weights).__name__} has no tensors"
    for part in weights.adapter.parts:
        a, b = weights.a[part.site], weights.b[part.site]
        assert a.shape == (part.rank, part.in_features), f"A of {part} is {tuple(a.shape)}"
        assert b.shape == (part.out_features, part.rank), f"B of {part} is {tuple(b.shape)}"
    return weights


def padded_rank(adapter: Adapter, max_rank: int) -> int:
    """The rank up to which a slot is written at every site: the adapter's, rounded up to a multiple of 16."""
    return min(-(-adapter.rank // RANK_STEP) * RANK_STEP, max_rank)


def check_range(weights: HostTensors, slot_dtype: str) -> None:
    """Raises AdapterInvalid, naming the tensor, where a cast to `slot_dtype` would make a finite value infinite."""
    dtype = DTYPES[slot_dtype]
    for suffix, tensors in (("lora_A", weights.a), ("lora_B", weights.b)):
        for site, values in tensors.items():
            if torch.finfo(values.dtype).max <= torch.finfo(dtype).max:
                continue
            extremes = torch.stack(torch.aminmax(values))
            if not extremes.to(dtype).isfinite().all():
                raise AdapterInvalid(
                    f"{site}.{suffix} has values that {slot_dtype} slots cannot hold",
                    tensor=f"{site}.{suffix}",
                    found=extremes.abs().max().item(),
                    wanted=f"at most {torch.finfo(dtype).max} for {slot_dtype} slots",
                )
