"""Turns the entries of a batch into the index arrays that every kernel runs on: the only copy of that logic.

Invariant: each row is in exactly one segment or in one BASE range, and each slot has at most one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Plan", "Segment", "plan_by_row", "plan_rows", "slots_by_row"]

_BASE = 1 << 62  # stands for BASE among slots, and sorts behind them all
_FEW = 32  # up to here lists are faster than numpy


class Segment(NamedTuple):
    """The positions [start, stop) of all rows that use `slot`."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Which positions use which slot, and which row each position is.

    `order` is int64 [rows], position → row, and `inverse` row → position; both are None when position = row. With an
    order the BASE rows have the last positions, as one range, and segments are in order of their slots.
    """

    rows: int
    segments: tuple[Segment, ...]
    base_ranges: tuple[tuple[int, int], ...]
    order: Tensor | None = None
    inverse: Tensor | None = None

    @property
    def adapter_rows(self) -> int:
        """Number of rows that use a slot."""
        return self.rows - sum(stop - start for start, stop in self.base_ranges)


class _Runs(NamedTuple):
    """Neighbouring rows of one slot each, as columns."""

    slots: list[int]
    starts: list[int]
    stops: list[int]


def plan_rows(entries: Sequence[tuple[int | None, int]]) -> Plan:
    """Groups the rows of `entries`, each (slot, or None for BASE; number of rows), by slot.

    Rows are numbered in the order of the entries. Where the rows of each slot are neighbours already, they stay:

        entries   (7, 2) (BASE, 1) (3, 1)           row        0 1  2  3
                                                    segments  |7 7|  | 3|       base_ranges ((2, 3),)

    Otherwise the rows of a slot move together, lowest slot first, BASE last, and keep their order in the group:

        entries   (7, 2) (BASE, 1) (3, 1) (7, 1)    row        0 1  2  3  4
                                                    slot       7 7  -  3  7
        order     [3, 0, 1, 4, 2]                   position   0  1 2 3  4
                                                    row        3  0 1 4  2
        inverse   [1, 2, 4, 0, 3]                   segments  |3||7 7 7|        base_ranges ((4, 5),)

    Raises ValueError for a negative count, or a negative slot, which would read another adapter from the end.
    """
    runs = _runs(entries)
    rows = runs.stops[-1] if runs.stops else 0
    if len(set(runs.slots)) == len(runs.slots) - max(runs.slots.count(_BASE) - 1, 0):
        return Plan(rows, *_split(runs))
    runs = _sorted(runs)
    order = _rows_of(runs, rows)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(rows)
    return Plan(rows, *_split(_grouped(runs)), torch.from_numpy(order), torch.from_numpy(inverse))


def slots_by_row(plan: Plan) -> Tensor:
    """int64 [rows]: the slot of each row, -1 for BASE."""
    slots = torch.full((plan.rows,), -1)
    for slot, start, stop in plan.segments:
        slots[start:stop] = slot
    return slots if plan.inverse is None else slots[plan.inverse]


def plan_by_row(slots: Tensor) -> Plan:
    """The plan of rows whose slot is said for each: int64 [rows], -1 for BASE. Groups as `plan_rows` does."""
    keys = torch.where(slots < 0, _BASE, slots).numpy()
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    runs = _Runs(found.tolist(), starts.tolist(), [*starts[1:].tolist(), len(keys)] if len(keys) else [])
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(keys))
    return Plan(len(keys), *_split(runs), torch.from_numpy(order), torch.from_numpy(inverse))


def _runs(entries: Sequence[tuple[int | None, int]]) -> _Runs:
    """The entries in their order, neighbours of one slot merged and empty ones left out."""
    runs = _Runs([], [], [])
    row, last = 0, -1
    for slot, count in entries:
        if count < 0 or (slot is not None and not 0 <= slot < _BASE):
            raise ValueError(f"entry {slot, count} has a negative count or an impossible slot")
        if not count:
            continue
        key = _BASE if slot is None else slot
        if key == last:
            runs.stops[-1] = row + count
        else:
            runs.slots.append(key)
            runs.starts.append(row)
            runs.stops.append(row + count)
        row, last = row + count, key
    return runs


def _sorted(runs: _Runs) -> _Runs:
    """The same runs, lowest slot first, those of a slot in their old order."""
    by_slot = sorted(range(len(runs.slots)), key=runs.slots.__getitem__)
    return _Runs(*([column[run] for run in by_slot] for column in runs))


def _rows_of(runs: _Runs, rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The rows of the runs, one run after the other: int64 [rows]."""
    if rows <= _FEW:
        return np.array(list(chain.from_iterable(map(range, runs.starts, runs.stops))), dtype=np.int64)
    starts, stops = np.array(runs.starts, dtype=np.int64), np.array(runs.stops, dtype=np.int64)
    ends = np.cumsum(stops - starts)
    rows_of: np.ndarray[tuple[int], np.dtype[np.int64]] = np.repeat(stops - ends, stops - starts) + np.arange(rows)
    return rows_of


def _grouped(runs: _Runs) -> _Runs:
    """One run per slot of sorted runs, over the positions 0, 1, …"""
    counts: dict[int, int] = {}
    for slot, start, stop in zip(*runs, strict=True):
        counts[slot] = counts.get(slot, 0) + stop - start
    stops = list(accumulate(counts.values()))
    return _Runs(list(counts), [0, *stops[:-1]], stops)


def _split(runs: _Runs) -> tuple[tuple[Segment, ...], tuple[tuple[int, int], ...]]:
    """The runs of slots as segments, and those of BASE as ranges."""
    rows = list(zip(*runs, strict=True))
    if _BASE not in runs.slots:
        return tuple(map(Segment._make, rows)), ()
    segments = tuple([Segment._make(row) for row in rows if row[0] != _BASE])
    return segments, tuple([(start, stop) for slot, start, stop in rows if slot == _BASE])
