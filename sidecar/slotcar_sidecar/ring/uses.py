"""How often a client of the direct plane computed by itself, read from the uses that it writes into its region.

They are its own word for it: counts that go back are taken for unchanged, and no look believes more than a bound.
"""

from __future__ import annotations

from typing import NamedTuple

from slotcar.shm import region

MOST_CALLS = 1 << 20
"""More than a client can make between two looks."""


class Growth(NamedTuple):
    """What came since the last look: the generations of the mappings in use, and how many Forwards with their rows."""

    generations: frozenset[int]
    calls: int
    rows: int


NOTHING = Growth(frozenset(), 0, 0)


class Uses:
    """`_last` has calls and rows by generation as of the last look, `_seen` also those of the one before it: a use may
    be missing from one look, while it is written.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._data = b""
        self._last: dict[int, tuple[int, int]] = {}
        self._seen: dict[int, tuple[int, int]] = {}

    def look(self, data: bytes) -> Growth:
        """What `data`, the bytes of all uses, has more than at the last look."""
        if data == self._data:
            return NOTHING
        self._data = data
        found: dict[int, tuple[int, int]] = {}
        for generation, calls, rows, _ in region.USE.iter_unpack(data):
            if generation:
                before = found.get(generation, (0, 0))
                found[generation] = max(calls, before[0]), max(rows, before[1])
        generations, all_calls, all_rows = set(), 0, 0
        for generation, (calls, rows) in found.items():
            seen_calls, seen_rows = self._seen.get(generation, (0, 0))
            found[generation] = max(calls, seen_calls), max(rows, seen_rows)
            if calls > seen_calls:
                generations.add(generation)
                all_calls += calls - seen_calls
                all_rows += max(rows - seen_rows, 0)
        self._last, self._seen = found, self._last | found
        calls = min(all_calls, MOST_CALLS)
        return Growth(frozenset(generations), calls, min(all_rows, calls * self._max_rows))
