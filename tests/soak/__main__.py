"""Random clients against one server that is killed again and again: `make soak MINUTES=10`.

python -m tests.soak [--minutes M] [--seed N] [--clients C]    run; exit code 1 when anything is wrong
python -m tests.soak --replay FOLDER                           judge the failing Forwards of a run again, offline
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from tests.soak.checker import Checker
from tests.soak.director import Director
from tests.soak.library import read_library
from tests.soak.plan import Plan, Pools
from tests.soak.records import load

_TOLD = 20
# A fresh server grows for some minutes, ever slower, until the allocator has as many holes as it gets.
_CALM_SHARE, _LEAST_CALM_SECONDS, _WARM_UP_SHARE = 1 / 3, 1080.0, 4 / 9


def plan_of(minutes: float, seed: int, clients: int) -> Plan:
    """In the last third, and in the last 18 minutes of half an hour or more, the server is left alone."""
    seconds = 60.0 * minutes
    calm = max(seconds * _CALM_SHARE, _LEAST_CALM_SECONDS) if minutes >= 30 else seconds * _CALM_SHARE
    return Plan(seed, seconds, calm, calm * _WARM_UP_SHARE, clients)


def soak(plan: Plan) -> int:
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {plan.seed}, {plan.seconds / 60:g} minutes, in {folder}", flush=True)
    outcome = Director(plan, folder, lambda line: print(line, flush=True)).run()
    print(outcome.table())
    wrong = outcome.problems()
    for line in (*wrong[:_TOLD], *outcome.missed()):
        print(f"WRONG {line}")
    if wrong:
        print(f"{len(wrong)} problems. What shows them: --replay {folder}; the same choices: --seed {plan.seed}")
    else:
        shutil.rmtree(folder)
    print(outcome.line())
    return 1 if wrong or list(outcome.missed()) else 0


def replay(folder: Path) -> int:
    """Judges the records that a failing run saved; 1 when they are still wrong."""
    checker = Checker(read_library(folder), Pools.read(folder))
    for record in load(folder / "failing.rec"):
        checker.check("replay", record)
    for finding in checker.findings:
        print(f"WRONG {finding.why}")
    print(f"{checker.tally.forwards} Forwards, {checker.tally.wrong_rows} wrong rows of {checker.tally.rows}")
    return 1 if checker.findings else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--replay", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.exit(
        replay(options.replay) if options.replay else soak(plan_of(options.minutes, options.seed, options.clients))
    )


if __name__ == "__main__":
    main()
