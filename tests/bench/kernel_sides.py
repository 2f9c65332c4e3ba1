"""The sides of the kernels' benchmark: ours, PEFT's layer, and what no kernel can do without."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as PeftLinear
from slotcar_kernels.cpu import Kernel, prepare
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.sites import SiteSlots

from tests.bench.harness import Call
from tests.bench.slots import PrivateSlots
from tests.bench.stage import Site

__all__ = ["Batch", "Case", "Weights", "make_ours", "make_peft", "make_product", "make_read"]


@dataclass(frozen=True)
class Case:
    tokens: int
    adapters: int
    rank: int
    hidden: int
    dtype: str
    popularity: str = "uniform"

    @property
    def is_zipf(self) -> bool:
        return self.popularity == "zipf"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class Batch:
    """The same tokens for all sides; `owners` is the adapter of each token."""

    case: Case
    owners: list[int]
    x: torch.Tensor
    base: torch.Tensor

    @classmethod
    def of(cls, case: Case) -> Batch:
        dice = random.Random(0)
        owners = [token % case.adapters for token in range(case.tokens)]
        if case.is_zipf:
            shares = [1 / (adapter + 1) for adapter in range(case.adapters)]
            owners = dice.choices(range(case.adapters), shares, k=case.tokens)
        dice.shuffle(owners)
        x, base = (torch.randn(case.tokens, case.hidden).to(case.torch_dtype) for _ in range(2))
        return cls(case, owners, x, base)


@dataclass(frozen=True)
class Weights:
    """Copies of one site's adapters in memory as the sidecar's: adapter n of copy c is in slot c · adapters + n."""

    case: Case
    copies: int
    site: SiteSlots

    @classmethod
    def of(cls, case: Case, total_bytes: int) -> Weights:
        """As many copies as have `total_bytes`, and one more."""
        one = 2 * case.adapters * case.rank * case.hidden * case.torch_dtype.itemsize
        copies = math.ceil(total_bytes / one) + 1
        site = Site("site", case.hidden, case.hidden)
        slots = PrivateSlots([site], copies * case.adapters, case.rank, case.torch_dtype, "shared")
        for adapter in range(case.adapters):
            a = torch.randn(case.rank, case.hidden) * case.hidden**-0.5
            b = torch.randn(case.hidden, case.rank) * case.rank**-0.5
            for copy in range(copies):
                slots.fill(copy * case.adapters + adapter, {site.name: (a, b)})
        return cls(case, copies, slots.sites[site.name])

    def slot(self, copy: int, adapter: int) -> int:
        return copy * self.case.adapters + adapter


class GivenBase(torch.nn.Module):
    """A base layer without cost: returns the tensor that it was given."""

    result: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.result


class _Turns:
    """Calls one after the other, over and over; returns where all of them write."""

    def __init__(self, calls: Sequence[Call], out: torch.Tensor) -> None:
        self._calls = itertools.cycle(calls)
        self._out = out

    def __call__(self) -> torch.Tensor:
        next(self._calls)()
        return self._out


def make_ours(batch: Batch, weights: Weights, kernel: Kernel) -> Call:
    """Prepared calls, one for each copy."""
    out = torch.empty_like(batch.base)
    plans = [plan_rows([(weights.slot(copy, owner), 1) for owner in batch.owners]) for copy in range(weights.copies)]
    calls = [prepare(plan, batch.x, [weights.site], [out], [batch.base], kernel) for plan in plans]
    return _Turns(calls, out)


def make_read(batch: Batch, weights: Weights) -> Call:
    """Reads x and the weights of the batch's adapters once, each slot's A and B in one go, and copies base to out."""
    stride = weights.site.a.stride(0) * weights.site.a.element_size() // 4
    memory = torch.empty(0, dtype=torch.float32).set_(
        weights.site.a.untyped_storage(),
        weights.site.a.storage_offset() * weights.site.a.element_size() // 4,
        (len(weights.site.a) * stride,),
    )
    x, out = batch.x.flatten().view(torch.float32), torch.empty_like(batch.base)
    runs = _runs(sorted(set(batch.owners)))

    def read(copy: int) -> Call:
        slots = [(weights.slot(copy, first), weights.slot(copy, last) + 1) for first, last in runs]
        parts = [x, *(memory[first * stride : stop * stride] for first, stop in slots)]
        return lambda: ([torch.dot(part, part) for part in parts], out.copy_(batch.base))

    return _Turns([read(copy) for copy in range(weights.copies)], out)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours."""
    starts = [number for number in numbers if number - 1 not in numbers]
    return list(zip(starts, [number for number in numbers if number + 1 not in numbers], strict=True))


def make_product(case: Case) -> Call:
    """One float32 matrix product with as many multiplications as the adapters of all tokens need."""
    x, weight = torch.randn(case.tokens, case.hidden), torch.randn(case.hidden, 2 * case.rank)
    out = torch.empty(case.tokens, 2 * case.rank)
    return lambda: torch.mm(x, weight, out=out)


def make_peft(batch: Batch, weights: Weights, adapter_dtype: str) -> Call:
    """PEFT's mixed batch, a layer for each copy; each adds to a base of its own, so only its first result is right."""
    layers = [_peft_layer(weights, copy, getattr(torch, adapter_dtype)) for copy in range(weights.copies)]
    for layer in layers:
        layer.base_layer.result = batch.base.clone()
    names = [str(owner) for owner in batch.owners]
    turns = itertools.cycle(layers)

    @torch.no_grad()
    def call() -> torch.Tensor:
        layer = next(turns)
        result: torch.Tensor = layer(batch.x, adapter_names=names)
        return result

    return call


def _peft_layer(weights: Weights, copy: int, adapter_dtype: torch.dtype) -> PeftLinear:
    """PEFT's layer with the adapters of one copy, in eval mode, over a base without cost."""
    case, site = weights.case, weights.site
    alpha = site.scales[0] * case.rank
    config = LoraConfig(r=case.rank, lora_alpha=alpha, init_lora_weights=False)
    linear = torch.nn.Linear(case.hidden, case.hidden, bias=False, device="meta")
    layer = PeftLinear(linear, "0", config, r=case.rank, lora_alpha=alpha)
    for adapter in range(1, case.adapters):
        layer.update_layer(str(adapter), case.rank, alpha, config=config)
    for adapter in range(case.adapters):
        slot = weights.slot(copy, adapter)
        for linears, values in ((layer.lora_A, site.a[slot]), (layer.lora_B, site.b[slot].t())):
            weight = torch.nn.Parameter(values.to(adapter_dtype, copy=True).contiguous(), requires_grad=False)
            linears[str(adapter)].weight = weight
    layer.base_layer = GivenBase()
    return layer.eval()
