"""How fast memory grows: the least-squares line over samples of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SLOPE_SECONDS = 600.0


class Slope(NamedTuple):
    """Growth of the least-squares line in percent of its mean per ten minutes, over `seconds` of samples."""

    percent: float
    seconds: float
    mean_bytes: float
    samples: int


def least(samples: Sequence[tuple[float, int]], seconds: float) -> list[tuple[float, int]]:
    """The least sample of each `seconds`: what is in flight comes and goes, what stays is in all of them."""
    found: dict[int, tuple[float, int]] = {}
    for sample in samples:
        span = int(sample[0] // seconds)
        found[span] = min(sample, found.get(span, sample), key=lambda each: each[1])
    return list(found.values())


def slope(samples: Sequence[tuple[float, int]]) -> Slope | None:
    """The slope of (seconds, bytes); None with fewer than three samples."""
    if len(samples) < 3:
        return None
    times, values = [time for time, _ in samples], [value for _, value in samples]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - middle) ** 2 for time in times)
    if not spread:
        return None
    per_second = sum((time - middle) * (value - mean) for time, value in samples) / spread
    return Slope(100.0 * per_second * SLOPE_SECONDS / mean, times[-1] - times[0], mean, len(samples))
