"""Which adapters are asked for, in order: synthetic traces, seeded, and one that a server recorded.

Adapters are numbers; of the synthetic ones each has a size and a time of a reload of its own: ranks of 8 to 64, three
quarters of them on a local disk and one quarter behind a network that is twenty times as slow.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

__all__ = ["RECORDED", "SYNTHETIC", "Trace", "read_trace", "synthetic", "write_trace", "zipf"]

RECORDED = Path(__file__).with_name("traces") / "engines.txt"
_MIB_PER_RANK = 1
_LOCAL_MIB_PER_SECOND = 800.0
_REMOTE_MIB_PER_SECOND = 40.0
_NUMBERS_PER_LINE = 24


@dataclass(frozen=True)
class Trace:
    """`requests` are numbers of adapters; `mib` and `seconds` have, by number, the size and the time of a reload."""

    name: str
    requests: Sequence[int]
    mib: Sequence[int]
    seconds: Sequence[float]

    @classmethod
    def of(cls, name: str, requests: Sequence[int], seed: int = 0) -> Trace:
        """With sizes and times that follow from the seed."""
        chosen = random.Random(seed + 1)
        mib = [_MIB_PER_RANK * chosen.choice((8, 16, 16, 32, 64)) for _ in range(max(requests) + 1)]
        rates = [chosen.choice((*[_LOCAL_MIB_PER_SECOND] * 3, _REMOTE_MIB_PER_SECOND)) for _ in mib]
        return cls(name, requests, mib, [size / rate for size, rate in zip(mib, rates, strict=True)])


def zipf(chosen: random.Random, adapters: int, exponent: float) -> Iterator[int]:
    """Adapter n is asked for in proportion to 1 / (n + 1)^exponent, independently of what came before."""
    sums = list(accumulate((number + 1) ** -exponent for number in range(adapters)))
    while True:
        yield bisect(sums, chosen.random() * sums[-1])


def _zipf(exponent: float) -> Callable[[random.Random, int, int], Iterator[int]]:
    return lambda chosen, adapters, length: zipf(chosen, adapters, exponent)


def _scans(chosen: random.Random, adapters: int, length: int) -> Iterator[int]:
    """zipf 0.9, and eight times a nightly job that asks for a tenth of all adapters, one after the other."""
    popular = zipf(chosen, adapters, 0.9)
    every = max(1, length // 8)
    for number in range(length):
        yield next(popular)
        if number % every == every // 2:
            start = chosen.randrange(adapters)
            yield from ((start + step) % adapters for step in range(max(1, adapters // 10)))


def _diurnal(chosen: random.Random, adapters: int, length: int) -> Iterator[int]:
    """zipf 1.0 over two crowds, of the day and of the night, each with favourites of its own; two days."""
    day, night = zipf(chosen, adapters, 1.0), zipf(chosen, adapters, 1.0)
    for number in range(length):
        of_day = abs((number / length * 4) % 2 - 1)
        yield next(day) if chosen.random() < of_day else adapters - 1 - next(night)


def _bursts(chosen: random.Random, adapters: int, length: int) -> Iterator[int]:
    """Conversations: an adapter of zipf 0.9 is asked for about a dozen times, among those of fifteen others."""
    popular = zipf(chosen, adapters, 0.9)
    going = [next(popular) for _ in range(16)]
    while True:
        at = chosen.randrange(len(going))
        yield going[at]
        if chosen.random() < 1 / 12:
            going[at] = next(popular)


_KINDS: Mapping[str, Callable[[random.Random, int, int], Iterator[int]]] = {
    "zipf 0.9": _zipf(0.9),
    "zipf 1.2": _zipf(1.2),
    "scans": _scans,
    "diurnal": _diurnal,
    "bursts": _bursts,
}
SYNTHETIC = tuple(_KINDS)


def synthetic(name: str, seed: int, adapters: int = 1000, length: int = 20_000) -> Trace:
    """A trace of one of the SYNTHETIC kinds."""
    requests = _KINDS[name](random.Random(seed), adapters, length)
    return Trace.of(name, list(islice(requests, length)), seed)


def write_trace(path: Path, text: str, requests: Sequence[int]) -> None:
    """A line that says what it is, then the numbers in order."""
    lines = [
        " ".join(map(str, requests[start : start + _NUMBERS_PER_LINE]))
        for start in range(0, len(requests), _NUMBERS_PER_LINE)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([f"# {text}", *lines, ""]), encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """What `write_trace` wrote. Raises ValueError for what is no number."""
    lines = path.read_text(encoding="utf-8").splitlines()
    numbers = [int(word) for line in lines if not line.startswith("#") for word in line.split()]
    return Trace.of("recorded", numbers)
