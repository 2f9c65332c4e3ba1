"""What a device needs of host weights, and whether they can be written into its slots without loss of meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from slotcar_kernels.buffers import DTYPES
from torch import Tensor

from slotcar_sidecar.core.adapter import Adapter, SiteLora
from slotcar_sidecar.core.errors import AdapterInvalid
from slotcar_sidecar.core.ports import HostAdapter

__all__ = [
    "RANK_STEP",
    "HostTensors",
    "cast_warnings",
    "check_range",
    "folded_b",
    "host_tensors",
    "padded_rank",
    "vectors_of",
]

RANK_STEP = 16


class Vectors(Protocol):
    """Of a site's outputs, float32 [out]; None counts as zeros."""

    @property
    def gain(self) -> Tensor | None: ...
    @property
    def bias(self) -> Tensor | None: ...


@runtime_checkable
class HostTensors(Protocol):
    """Per targeted module A and B, as in the file, without the scale: [rank, in] and [out, rank].

    Those of experts that are one module are [E · rank, in] and [out, rank · E].
    """

    @property
    def adapter(self) -> Adapter: ...
    @property
    def a(self) -> Mapping[str, Tensor]: ...
    @property
    def b(self) -> Mapping[str, Tensor]: ...


@runtime_checkable
class _HostVectors(Protocol):
    @property
    def vectors(self) -> Mapping[str, Vectors]: ...


def host_tensors(weights: HostAdapter) -> HostTensors:
    """The tensors of a host adapter, with the shapes that its parts say."""
    assert isinstance(weights, HostTensors), f"{type(weights).__name__} has no tensors"
    for part in weights.adapter.parts:
        rank = part.rank * (part.experts or 1)
        a, b = weights.a[part.site], weights.b[part.site]
        assert a.shape == (rank, part.in_features), f"A of {part} is {tuple(a.shape)}"
        assert b.shape == (part.out_features, rank), f"B of {part} is {tuple(b.shape)}"
        for vector in vectors_of(weights, part):
            assert vector is None or (vector.shape, vector.dtype) == ((part.out_features,), torch.float32), part
    return weights


def vectors_of(weights: HostTensors, part: SiteLora) -> tuple[Tensor | None, Tensor | None]:
    """Gain and bias of a part, each where the part says that it has one."""
    if not (part.has_gain or part.has_bias):
        return None, None
    assert isinstance(weights, _HostVectors), f"{type(weights).__name__} has no vectors"
    vectors = weights.vectors[part.site]
    return (vectors.gain if part.has_gain else None), (vectors.bias if part.has_bias else None)


def folded_b(weights: HostTensors, part: SiteLora) -> Tensor:
    """B, each row times 1 + gain: what a slot has, so that DoRA's g is applied once, in float32."""
    b, (gain, _) = weights.b[part.site], vectors_of(weights, part)
    return b if gain is None else b.float() * (1 + gain)[:, None]


def padded_rank(adapter: Adapter, max_rank: int) -> int:
    """The rank up to which a slot is written at every site: the adapter's, rounded up to a multiple of 16."""
    return min(-(-adapter.rank // RANK_STEP) * RANK_STEP, max_rank)


def check_range(weights: HostTensors, slot_dtype: str) -> None:
    """Raises AdapterInvalid, naming the tensor, where a cast to `slot_dtype` would make a finite value infinite."""
    dtype = DTYPES[slot_dtype]
    most = torch.finfo(dtype).max
    for name, values in _slot_tensors(weights, lambda found: torch.finfo(found).max > most):
        if not values.numel():
            continue
        extremes = torch.stack(torch.aminmax(values))
        if not extremes.to(dtype).isfinite().all():
            count = int(values.to(dtype).isinf().sum())
            raise AdapterInvalid(
                f"{name} has {count} of {values.numel()} values that {slot_dtype} slots cannot hold",
                tensor=name,
                found=extremes.abs().max().item(),
                wanted=f"at most {most} for {slot_dtype} slots",
                count=count,
            )


def cast_warnings(weights: HostTensors, slot_dtype: str) -> tuple[str, ...]:
    """What a cast to `slot_dtype` loses, for people: values that are not zero and become zero, tensor by tensor."""
    dtype = DTYPES[slot_dtype]
    counts = {
        name: int(((values != 0) & (values.to(dtype) == 0)).sum())
        for name, values in _slot_tensors(weights, lambda found: _least(found) < _least(dtype))
    }
    lost = {name: count for name, count in counts.items() if count}
    if not lost:
        return ()
    most = max(lost, key=lost.__getitem__)
    count = sum(lost.values())
    return (f"{count} values are too small for {slot_dtype} slots and become zero, most of them in {most}",)


def _least(dtype: torch.dtype) -> float:
    """The least value above zero."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps


def _slot_tensors(weights: HostTensors, may_lose: Callable[[torch.dtype], bool]) -> Iterator[tuple[str, Tensor]]:
    """What is cast to the slots' dtype from one that may lose by it, by its name in the file."""
    for part in weights.adapter.parts:
        a, b = weights.a[part.site], weights.b[part.site]
        if may_lose(a.dtype):
            yield f"{part.site}.lora_A", a
        if may_lose(torch.float32 if part.has_gain else b.dtype):
            yield f"{part.site}.lora_B", folded_b(weights, part)
