"""Times one shrink and expand of each side in one case, as replays of CUDA graphs, and writes JSON.

    python -m tests.gpu.measure NUMBER [FILE.json]

Without a file, every side of the case is only checked, and compiled. A replay has a pair for each site of a step; sides
are replayed in turns. Every side's result is compared with float64 before it is timed, and a side that fails is an
error of its own; the exit code is 1 if one did.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from tests.gpu.atomics import SETTINGS
from tests.gpu.place import DEVICE
from tests.gpu.report import CASES, Case, Result, median_us
from tests.gpu.sides import Launch, Step, atomics_side, nothing, slotcar_side, torch_side

ROUNDS = 15
ROUND_SECONDS = 0.004
COPY_BYTES = 1 << 30
# Of results of the order of 1, in bfloat16, from sums whose halves others round to bfloat16 too.
RELATIVE, ABSOLUTE = 0.03, 0.05


class Timed:
    """A graph of launches, and the seconds of each of its rounds, for one replay."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for launch in launches[:2]:
                launch()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for launch in launches:
                launch()
        self._replays = 1
        self.round()
        self._replays = max(1, math.ceil(ROUND_SECONDS / self.round()))
        self.seconds: list[float] = []

    def round(self) -> float:
        """Seconds of one replay, from several."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(self._replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self._replays


def check(step: Step, launches: Sequence[Launch]) -> None:
    """Raises AssertionError unless the first site's launch gives what float64 gives."""
    site = step.sites[0]
    wanted = site.wanted(step.slots)
    launches[0]()
    torch.testing.assert_close(site.out.double(), wanted, rtol=RELATIVE, atol=ABSOLUTE)


def sides(step: Step) -> dict[str, Callable[[], list[Launch]]]:
    """How to make the launches of each side."""
    return {
        "slotcar": partial(_slotcar, step),
        "torch": partial(torch_side, step),
        **{f"atomics {setting.name}": partial(atomics_side, step, setting) for setting in SETTINGS},
    }


def _slotcar(step: Step) -> list[Launch]:
    plan, launches = slotcar_side(step)
    plan()
    return launches


def measure(case: Case, copy_bytes_per_second: float, graph: type[Timed] = Timed) -> Result:
    """The medians of all sides; `graph` is how launches are replayed and timed."""
    step, errors, timed = Step.of(case), {}, {}
    for name, make in sides(step).items():
        try:
            launches = make()
            check(step, launches)
            timed[name] = graph(launches)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error)[:500]}"
    where = torch.zeros(1, device=DEVICE)
    timed["empty"] = graph([partial(nothing, where)] * (2 * len(step.sites)))
    if "slotcar" in timed:
        timed["plan"] = graph([slotcar_side(step)[0]] * len(step.sites))
    for _ in range(ROUNDS):
        for side in timed.values():
            side.seconds.append(side.round())
    us = {name: median_us(side.seconds, len(step.sites)) for name, side in timed.items()}
    empty, by_setting = us.pop("empty"), [us[name] for name in us if name.startswith("atomics")]
    if by_setting:
        us["atomics"] = min(by_setting)
    return Result(case, len(step.sites), us, empty, copy_bytes_per_second, errors)


def copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    copied = Timed([partial(torch.empty_like(source).copy_, source)] * 4)
    seconds = [copied.round() for _ in range(ROUNDS)]
    return 2 * COPY_BYTES / (median_us(seconds, 4) / 1e6)


def main(number: int, path: Path | None = None) -> int:
    torch.manual_seed(0)
    if path is None:
        step = Step.of(CASES[number], fewest_bytes=0)
        for make in sides(step).values():
            check(step, make())
        print("right")
        return 0
    result = measure(CASES[number], copy_bandwidth())
    path.write_text(json.dumps(result.to_dict(), indent=2))
    print(result.case.name, result.us)
    for name, error in result.errors.items():
        print(f"{name}: {error}")
    return int(bool(result.errors))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *map(Path, sys.argv[2:3])))
