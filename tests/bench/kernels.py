"""The LoRA kernel of the CPU against PEFT's mixed batch, against torch alone, and against the machine's roof.

What is measured, for all: result = base + scale · (x Aᵀ) Bᵀ per row, at one site, where base is there already: the base
model's own linear layer is in no number. To that end PEFT's layer gets a base layer that returns a tensor made before,
to which PEFT adds in place; ours writes another tensor (ADD). Weights come from memory, not from caches: each call uses
the next of several copies, together more than twice the last-level cache; x and base stay where they are. The tokens'
adapters are spread evenly or by zipf's law, and at random over the batch, the same way for all.

In favour of ours: a call is prepared once, outside the loop, as both shared-memory planes and `attach` do for the
hundreds of calls of a batch; PEFT has no such step, so it groups the rows in each call. Ours reads from memory as the
sidecar's slots have it: shared, with huge pages where the system has them for that. In favour of PEFT: with 16-bit
inputs it runs with float32 or 16-bit adapters, whichever is faster here; ours has slots of the input's dtype.

The roof is what every kernel must do, as fast as torch does it here, whichever takes longer (`limit`): read x and the
bytes of the batch's adapters once (a dot product of float32), and write out from base; or make as many multiplications
in one float32 matrix product whose operands are in a cache. What the roof allows over PEFT is PEFT's time over the
roof's: `roof_over_peft`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from slotcar_kernels import native
from slotcar_kernels.cpu import Kernel

from tests.bench.harness import Call, Peer, Record, interleaved, last_level_cache_bytes, records, timed
from tests.bench.kernel_sides import Batch, Case, Weights, make_ours, make_peft, make_product, make_read
from tests.bench.sizes import Size, add_sizes

TOKENS = (1, 8, 32, 128, 256)
ADAPTERS = (1, 8, 32)
RANKS = (8, 16, 64)
DTYPES = ("float32", "bfloat16")
DECODE = ((8, 8), (16, 8), (32, 8), (32, 32))  # the tokens and adapters of batches that targets speak of
PREFILL = ((128, 32),)
MICROSECONDS = {Size.SMOKE: 0, Size.QUICK: 250_000, Size.FULL: 1_500_000}  # that one side of a case may take
FEWEST_RUNS, MOST_RUNS = 15, 200


def cases(size: Size) -> Iterator[Case]:
    """The targets' first; in the full size all others follow, at one rank also of another width or zipf."""
    wanted = list(itertools.product(DTYPES, RANKS, DECODE + PREFILL))
    first = [Case(tokens, adapters, rank, 4096, dtype) for dtype, rank, (tokens, adapters) in wanted]
    if size is Size.SMOKE:
        first = [Case(8, 8, 8, 512, dtype) for dtype in DTYPES]
    yield from first
    if size is not Size.FULL:
        return
    for dtype, rank, tokens, adapters in itertools.product(DTYPES, RANKS, TOKENS, ADAPTERS):
        case = Case(tokens, adapters, rank, 4096, dtype)
        variants = [case]
        if rank == 16:
            variants += [replace(case, hidden=2048), replace(case, popularity="zipf")]
        if adapters <= tokens:
            yield from (one for one in variants if one not in first and (adapters > 1 or not one.is_zipf))


def run(case: Case, size: Size, kernel: Kernel) -> None:
    """Prints a record for each peer, after all sides gave the same result."""
    batch, weights = Batch.of(case), Weights.of(case, 2 * last_level_cache_bytes())
    ours, reference = make_ours(batch, weights, kernel), make_ours(batch, weights, Kernel("torch"))
    pefts = {dtype: make_peft(batch, weights, dtype) for dtype in dict.fromkeys(("float32", case.dtype))}
    for side in (*pefts.values(), reference):
        torch.testing.assert_close(side(), ours(), rtol=0.02, atol=0.02)
    adapter_dtype = _fastest(pefts)
    peft = pefts[adapter_dtype]
    peers: dict[Peer, Call] = {"peft": peft, "roof": make_read(batch, weights), "base": make_product(case)}
    if size is Size.FULL:
        peers["torch"] = reference
    longest = max(timed(call).wall for call in (ours, *peers.values()))
    runs = 3 if size is Size.SMOKE else round(min(max(MICROSECONDS[size] / longest, FEWEST_RUNS), MOST_RUNS))
    found = {record.peer: record for record in records("kernels", {}, ("slotcar", ours), peers, runs)}
    read, product = found.pop("roof"), replace(found.pop("base"), peer="roof")
    roof, limit = (read, "memory") if read.peer_median >= product.peer_median else (product, "arithmetic")
    described = {
        **asdict(case),
        "kernel": kernel.name or native.backend(),
        "peft_adapter_dtype": adapter_dtype,
        "limit": limit,
        "roof_over_peft": round(found["peft"].peer_median / roof.peer_median, 2),
    }
    for record in (*found.values(), roof):
        replace(record, case={**described, **_target(case, record)}).printed()


def _target(case: Case, record: Record) -> Mapping[str, Any]:
    """Whether a target speaks of this line."""
    shape, is_plain = (case.tokens, case.adapters), case.hidden == 4096 and not case.is_zipf
    peers = {"peft", "roof"} if shape in DECODE else {"roof"} if shape in PREFILL else set()
    return {"target": True} if is_plain and record.peer in peers else {}


def _fastest(calls: Mapping[str, Call]) -> str:
    times = dict(zip(calls, interleaved(list(calls.values()), 7), strict=True))
    return min(calls, key=lambda name: statistics.median(took.cpu for took in times[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add_sizes(parser)
    parser.add_argument("--kernel", help=f"one of {native.ISAS} or torch, instead of the best one")
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    random.seed(0)
    for case in cases(arguments.size):
        run(case, arguments.size, Kernel(arguments.kernel, arguments.threads))


if __name__ == "__main__":
    main()
