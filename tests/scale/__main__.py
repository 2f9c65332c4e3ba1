"""Thousands of adapters on a few slots: `python -m tests.scale [--adapters N] [--requests N] [--record FILE]`.

Prints what was counted; the exit code is 1 when a row was wrong, a Forward waited for a loader, or the hit ratio is
more than a tenth away from what the policy does by itself on the same trace.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from slotcar_sidecar.core.policy import Eviction

from tests.bench.trace import write_trace
from tests.scale.run import Plan, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, default=Plan.adapters)
    parser.add_argument("--requests", type=int, default=Plan.requests)
    parser.add_argument("--slots", type=int, default=Plan.slots)
    parser.add_argument("--exponent", type=float, default=Plan.exponent)
    parser.add_argument("--eviction", type=Eviction, choices=tuple(Eviction), default=Plan.eviction)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--record", type=Path, help="file for the order in which the server answered")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(given.adapters, given.requests, given.slots, given.exponent, eviction=given.eviction, seed=given.seed)
    with tempfile.TemporaryDirectory(prefix="slotcar-scale-") as folder:
        outcome = run(plan, Path(folder), lambda line: print(line, flush=True))
    for line in outcome.lines():
        print(line)
    for fault in outcome.faults():
        print(f"WRONG {fault}")
    if given.record is not None:
        about = f"the order in which a server answered {len(plan.planes)} engines of tests.scale"
        write_trace(given.record, about, outcome.order)
    sys.exit(bool(outcome.faults()))


if __name__ == "__main__":
    main()
