"""The LoRA kernel of the CPU against PEFT's mixed batch and the memory: `python -m tests.bench.kernels [--quick]`.

What is measured, for both: result = base + scale · (x Aᵀ) Bᵀ per row, at one site, where base is there already: the
base model's own linear layer is in the numbers of neither. To that end PEFT's layer gets a base layer that returns a
tensor made before, to which PEFT adds in place; ours writes another tensor (ADD). Weights come from memory, not from
caches: each call uses the next of several copies, together more than twice the last-level cache; x and base stay where
they are. Adapters are spread over the tokens at random, the same way for both.

In favour of ours: the plan is made once, outside the loop, as an engine makes one per batch for its hundreds of sites;
PEFT has no such step, so it groups the rows in each call. In favour of PEFT: with 16-bit inputs it runs with float32 or
16-bit adapters, whichever is faster here; ours has slots of the input's dtype.

The roof (`lora_roof`) is torch reading the adapters' bytes once, as a sum of float32: no kernel that must read them all
can be much faster, so the ratio says which part of the memory's bandwidth ours uses. With many tokens per adapter the
arithmetic, not the memory, is the limit, and the ratio falls.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import peft
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as PeftLinear
from slotcar_kernels import native
from slotcar_kernels.cpu import Kernel, lora_forward
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.sites import SiteSlots

from tests.bench.harness import Call, compare, interleaved, last_level_cache_bytes

TOKENS = (1, 8, 32, 128)
ADAPTERS = (1, 8, 32)
RANKS = (8, 16, 64)
SCALE = 0.5
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    tokens: int
    adapters: int
    rank: int
    hidden: int
    dtype: str


class GivenBase(torch.nn.Module):
    """A base layer without cost: returns the tensor that it was given."""

    result: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.result


@dataclass(frozen=True)
class Batch:
    """The same tokens for both sides; `owners` is the adapter of each token."""

    case: Case
    owners: list[int]
    x: torch.Tensor
    base: torch.Tensor

    @classmethod
    def of(cls, case: Case) -> Batch:
        owners = [token % case.adapters for token in range(case.tokens)]
        random.Random(0).shuffle(owners)
        dtype = getattr(torch, case.dtype)
        x, base = (torch.randn(case.tokens, case.hidden).to(dtype) for _ in range(2))
        return cls(case, owners, x, base)


def make_ours(batch: Batch, weights: list[SiteSlots], kernel: Kernel) -> Callable[[], torch.Tensor]:
    plan = plan_rows([(owner, 1) for owner in batch.owners])
    out = torch.empty_like(batch.base)
    copies = itertools.cycle(weights)

    def call() -> torch.Tensor:
        lora_forward(plan, batch.x, (next(copies),), (out,), (batch.base,), kernel)
        return out

    return call


def make_roof(weights: list[SiteSlots]) -> Call:
    copies = itertools.cycle([(site.a.view(torch.float32), site.b.view(torch.float32)) for site in weights])

    def call() -> None:
        for values in next(copies):
            values.sum()

    return call


def make_peer(batch: Batch, weights: list[SiteSlots], adapter_dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    layers = [_peft_layer(batch.case, site, adapter_dtype) for site in weights]
    base = batch.base.clone()
    for layer in layers:
        layer.base_layer.result = base
    names = [str(owner) for owner in batch.owners]
    copies = itertools.cycle(layers)

    @torch.no_grad()
    def call() -> torch.Tensor:
        result: torch.Tensor = next(copies)(batch.x, adapter_names=names)
        return result

    return call


def _peft_layer(case: Case, site: SiteSlots, adapter_dtype: torch.dtype) -> PeftLinear:
    """PEFT's layer with the adapters of `site`, in eval mode, over a base without cost."""
    config = LoraConfig(r=case.rank, lora_alpha=case.rank * SCALE, init_lora_weights=False)
    linear = torch.nn.Linear(case.hidden, case.hidden, bias=False, device="meta")
    layer = PeftLinear(linear, "0", config, r=case.rank, lora_alpha=config.lora_alpha)
    for adapter in range(1, case.adapters):
        layer.update_layer(str(adapter), case.rank, config.lora_alpha, config=config)
    for adapter in range(case.adapters):
        for linears, values in ((layer.lora_A, site.a[adapter]), (layer.lora_B, site.b[adapter].t())):
            weight = torch.nn.Parameter(values.to(adapter_dtype).contiguous(), requires_grad=False)
            linears[str(adapter)].weight = weight
    layer.base_layer = GivenBase()
    return layer.eval()


def make_weights(case: Case) -> list[SiteSlots]:
    """Copies of one site's adapters, together more than twice the last-level cache."""
    dtype = getattr(torch, case.dtype)
    shape = (case.adapters, case.rank, case.hidden)
    copies = math.ceil(2 * last_level_cache_bytes() / (2 * math.prod(shape) * dtype.itemsize)) + 1
    a, b = torch.randn(shape) * case.hidden**-0.5, torch.randn(shape) * case.rank**-0.5
    tables = [case.rank] * case.adapters, [SCALE] * case.adapters
    return [SiteSlots(a.to(dtype, copy=True), b.to(dtype, copy=True), *tables) for _ in range(copies)]


def run(case: Case, runs: int, kernel: Kernel) -> None:
    batch, weights = Batch.of(case), make_weights(case)
    ours = make_ours(batch, weights, kernel)
    peers = {"float32": make_peer(batch, weights, torch.float32)}
    if case.dtype != "float32":
        peers[case.dtype] = make_peer(batch, weights, getattr(torch, case.dtype))
    for peer in peers.values():
        torch.testing.assert_close(peer(), ours(), rtol=0.02, atol=0.02)
    adapter_dtype = _fastest(peers)
    described = {**asdict(case), "kernel": kernel.name or native.backend(), "slot_dtype": case.dtype}
    compare(
        "lora_add",
        {**described, "peer_adapter_dtype": adapter_dtype},
        ours,
        peers[adapter_dtype],
        f"peft {peft.__version__} mixed batch",
        runs,
    )
    compare("lora_roof", described, ours, make_roof(weights), "a read of the adapters' bytes", runs)


def _fastest(calls: dict[str, Call]) -> str:
    if len(calls) == 1:
        return next(iter(calls))
    times = dict(zip(calls, interleaved(list(calls.values()), 7), strict=True))
    return min(times, key=lambda name: times[name].median.cpu)


def cases(hidden: int, ranks: Sequence[int]) -> list[Case]:
    combinations = itertools.product(DTYPES, ranks, TOKENS, ADAPTERS)
    return [
        Case(tokens, adapters, rank, hidden, dtype)
        for dtype, rank, tokens, adapters in combinations
        if adapters <= tokens
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="hidden 2048, rank 16 and fewer runs")
    parser.add_argument("--runs", type=int, help="calls of each side per case")
    parser.add_argument("--ranks", type=int, nargs="+", help=f"ranks, {RANKS} if not given")
    parser.add_argument("--kernel", help=f"one of {native.ISAS} or torch, instead of the best one")
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    kernel = Kernel(arguments.kernel, arguments.threads)
    ranks = arguments.ranks or ((16,) if arguments.quick else RANKS)
    for case in cases(2048 if arguments.quick else 4096, ranks):
        run(case, arguments.runs or (40 if arguments.quick else 200), kernel)


if __name__ == "__main__":
    main()
