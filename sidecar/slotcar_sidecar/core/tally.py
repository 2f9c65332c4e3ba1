"""Counts of Forwards by one writer, which nobody holds up: a reader may see the newest call half counted."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

BOUNDS_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Work(NamedTuple):
    """What a Forward computes: its rows, and the bytes of the tensors that come and go."""

    rows: int = 0
    in_bytes: int = 0
    out_bytes: int = 0


NO_WORK = Work()


class ForwardTally:
    """`reasons` counts by "OK" or row of the error table, `buckets` by the first bound that is not below the time.

    `queue_seconds` is the part of `seconds` before the kernels started.
    """

    __slots__ = ("buckets", "in_bytes", "out_bytes", "queue_seconds", "reasons", "rows", "seconds")

    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}
        self.rows = 0
        self.in_bytes = 0
        self.out_bytes = 0
        self.seconds = 0.0
        self.queue_seconds = 0.0
        self.buckets = [0] * (len(BOUNDS_SECONDS) + 1)

    def add(self, seconds: float, reason: str, work: Work = NO_WORK, queue_seconds: float = 0.0) -> None:
        """A Forward ended; `work` was computed, nothing if it was refused."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.seconds += seconds
        self.queue_seconds += queue_seconds
        self.rows += work.rows
        self.in_bytes += work.in_bytes
        self.out_bytes += work.out_bytes

    def add_elsewhere(self, calls: int, rows: int) -> None:
        """Forwards that another process computed; how long they took, and with how many bytes, is not known."""
        self.reasons["OK"] = self.reasons.get("OK", 0) + calls
        self.rows += rows

    def include(self, other: ForwardTally) -> None:
        """Adds what another writer counted, which counts no more."""
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        self.seconds += other.seconds
        self.queue_seconds += other.queue_seconds
        self.rows += other.rows
        self.in_bytes += other.in_bytes
        self.out_bytes += other.out_bytes
