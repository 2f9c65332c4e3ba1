"""Forwards over slots that another process writes, as units that are checked before and after (DESIGN I2).

Invariant: what a unit gives was read while no slot of its mapping had begun to change, and while the writer lived. Its
last check is made once its last kernel is *complete*, which the host waits for; that it was launched says nothing.

That is enough, as the writer sets a slot's word, in the host's memory, before it asks the GPU to change the slot: a
kernel that has read any of the change ended after the word was set, and the host looks after that end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slotcar_kernels.guard import Guard
from slotcar_kernels.moved import Moved, move
from slotcar_kernels.triton.plan import BatchPlan
from slotcar_kernels.triton.site import Prepared, SiteCall, planes_elements, prepare
from slotcar_kernels.triton.slices import SlicePart
from slotcar_kernels.triton.tiles import BUCKETS, MOST_ROWS

__all__ = ["CurrentStream", "Event", "Stream", "Unit", "UnitBatch", "UnitSite", "Units"]


class Event(Protocol):
    """A place in a stream's work."""

    def is_done(self) -> bool:
        """Whether all work before it is complete."""

    def wait(self) -> None:
        """Returns once all work before it is complete; the calling thread waits, no stream does."""

    def precede(self) -> None:
        """What comes next on the current stream waits for all work before it."""


class Stream(Protocol):
    """The caller's current stream on one device, whichever that is."""

    device: torch.device

    def current(self) -> AbstractContextManager[object]:
        """Where the device is the thread's."""

    def event(self) -> Event:
        """The place behind all of the stream's work so far."""


class CurrentStream:
    """That of a GPU of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device)

    def event(self) -> Event:
        return _GpuEvent(self.device)


class _GpuEvent:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def precede(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


@dataclass(frozen=True, slots=True, eq=False)
class UnitSite:
    """One site of a unit. x, base and y (the base's output) [rows, …], aux int32 [rows]; on any device.

    parts: views of the slots, with ranks and scales that do not change while a unit may read them. A site with the same
    parts object is laid out once.
    """

    parts: Sequence[SlicePart]
    dtype: torch.dtype
    x: Tensor | None = None
    base: Tensor | None = None
    aux: Tensor | None = None
    y: Tensor | None = None
    moved: Sequence[Moved] = ()


@dataclass(frozen=True, slots=True, eq=False)
class UnitBatch:
    """The rows of a mapping, by slot, -1 for BASE; `plans` are those of `MOST_ROWS` rows each, and of the rest."""

    guard: Guard
    slots: Sequence[int]
    plans: Sequence[BatchPlan]
    laid_out: dict[tuple[int, int, torch.dtype, bool], tuple[Sequence[SlicePart], Tensor, int]] = field(
        default_factory=dict
    )
    """By number of the plan, id of the parts, dtype, and whether there is a base: the parts, their table and blocks."""

    @property
    def padded_rows(self) -> int:
        return sum(plan.bucket for plan in self.plans)


class Unit:
    """What was launched, and leaves only by `take`."""

    def __init__(self, guard: Guard, event: Event, outs: list[Tensor], used: object) -> None:
        """`used` is what the kernels read and write, beside `outs`."""
        self._guard = guard
        self._event = event
        self._outs = outs
        self._used = used

    def is_done(self) -> bool:
        """Whether `take` would not wait."""
        return self._event.is_done()

    def take(self) -> list[Tensor]:
        """[rows, out] of each site, once all kernels are complete. Raises Changed; then nothing may be used."""
        self._event.wait()
        self._guard.end()
        return self._outs


class Units:
    """Launches units on the caller's current stream, each behind the one before, whatever stream that was on.

    So all share scratch memory, and what they read is laid out once. One thread at a time uses it.
    """

    def __init__(self, stream: Stream, slot_count: int) -> None:
        self._stream = stream
        self._slot_count = slot_count
        self._last: Event | None = None
        self._planes = torch.empty(0, dtype=torch.float32, device=stream.device)
        # Memory goes back to the stream that it came from, which need not be the one that a unit is on.
        self._flying: list[Unit] = []

    def batch(self, guard: Guard, slots: Sequence[int]) -> UnitBatch:
        """For rows of these slots. Raises ValueError for slots that there are not."""
        plans = []
        with self._stream.current():
            for start in range(0, len(slots), MOST_ROWS):
                rows = slots[start : start + MOST_ROWS]
                bucket = next(size for size in BUCKETS if size >= len(rows))
                plan = BatchPlan.of_bucket(bucket, self._slot_count, self._stream.device)
                plan.write(rows)
                self._after_the_last()
                plan.execute()
                plans.append(plan)
            self._last = self._stream.event()
        return UnitBatch(guard, slots, plans)

    def begin(self, batch: UnitBatch, sites: Sequence[UnitSite]) -> Unit:
        """Launches out = base + delta, or delta, of each site. Waits for nothing, unless tensors are the host's.

        Raises Changed where a slot has begun to change before, and ValueError for what does not fit.
        """
        batch.guard.begin(len(batch.slots))
        rows, outs, used = len(batch.slots), [], []
        xs: dict[int, Tensor] = {}
        with self._stream.current():
            self._after_the_last()
            try:
                for site in sites:
                    x = site.x
                    if x is not None:
                        _check("x", x, (len(batch.slots), site.parts[0].a.shape[-1]), site.dtype)
                        x = xs[id(x)] if id(x) in xs else xs.setdefault(id(x), self._padded(batch, x))
                    out, launched = self._launch(batch, site, x)
                    outs.append(out[:rows])
                    used.append(launched)
            finally:
                self._last = self._stream.event()
        unit = Unit(batch.guard, self._last, outs, used)
        self._flying = [flying for flying in self._flying if not flying.is_done()]
        self._flying.append(unit)
        return unit

    def wait(self) -> None:
        """Returns once all units are complete."""
        if self._last is not None:
            self._last.wait()
        self._flying.clear()

    def _after_the_last(self) -> None:
        if self._last is not None:
            self._last.precede()

    def _launch(self, batch: UnitBatch, site: UnitSite, x: Tensor | None) -> tuple[Tensor, list[Prepared]]:
        rows, width = len(batch.slots), sum(part.out_features for part in site.parts)
        for name, tensor in (("base", site.base), ("y", site.y)):
            if tensor is not None:
                _check(name, tensor, (rows, width), site.dtype)
        out = torch.empty(batch.padded_rows, width, dtype=site.dtype, device=self._stream.device)
        if site.base is not None:
            out[:rows].copy_(site.base)
        elif site.moved:
            out[:rows].zero_()
        y = out[:rows] if site.y is None or site.y is site.base else site.y.to(out.device)
        for moved in site.moved:
            move(moved, batch.slots, out[:rows, moved.columns], y[:, moved.columns])
        adds = site.base is not None or bool(site.moved)
        aux = None if site.aux is None else self._padded(batch, site.aux[:, None])
        launched, start = [], 0
        for number, plan in enumerate(batch.plans):
            piece = slice(start, start + plan.bucket)
            x_piece, aux_piece = (None if tensor is None else tensor[piece] for tensor in (x, aux))
            call = SiteCall(site.parts, out[piece], x_piece, out[piece] if adds else None, aux_piece)
            launched.append(self._prepared(batch, number, call))
            launched[-1].execute()
            start += plan.bucket
        return out, launched

    def _prepared(self, batch: UnitBatch, number: int, call: SiteCall) -> Prepared:
        """The call's launches, for the plan of that number; they are laid out as the first such call's were."""
        plan = batch.plans[number]
        needed = planes_elements(plan, call)
        if self._planes.numel() < needed:
            self._planes = torch.empty(needed, dtype=torch.float32, device=self._stream.device)
        if call.aux is not None:  # it has a plan of its own
            return prepare(plan, call, self._planes)
        key = number, id(call.parts), call.out.dtype, call.base is not None
        found = batch.laid_out.get(key)
        if found is None:
            made = prepare(plan, call, self._planes)
            batch.laid_out[key] = call.parts, made.table, made.blocks
            return made
        _, table, blocks = found
        return Prepared(plan, call, self._planes, table, blocks)

    def _padded(self, batch: UnitBatch, tensor: Tensor) -> Tensor:
        """A copy with as many rows as the plans', of which those behind the batch's have any values."""
        made = torch.empty(batch.padded_rows, tensor.shape[1], dtype=tensor.dtype, device=self._stream.device)
        made[: len(batch.slots)].copy_(tensor)
        return made


def _check(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raises ValueError unless it is exactly that; a copy would spread what is smaller."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, wanted {shape} {dtype}")
