"""Counts of Forwards by one writer, which nobody holds up: a reader may see the newest call half counted."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class ForwardTally:
    """`reasons` counts by "OK" or row of the error table, `buckets` by the first bound that is not below the time."""

    __slots__ = ("buckets", "reasons", "rows", "seconds")

    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}
        self.rows = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS_SECONDS) + 1)

    def add(self, rows: int, seconds: float, reason: str) -> None:
        """A Forward ended; `rows` were computed if it is OK."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.seconds += seconds
        if reason == "OK":
            self.rows += rows

    def add_elsewhere(self, calls: int, rows: int) -> None:
        """Forwards that another process computed; how long they took is not known."""
        self.reasons["OK"] = self.reasons.get("OK", 0) + calls
        self.rows += rows

    def include(self, other: ForwardTally) -> None:
        """Adds what another writer counted, which counts no more."""
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        self.seconds += other.seconds
        self.rows += other.rows
