"""Computes from slots that another process writes, as units that are checked before and after (DESIGN I2).

Invariant: what a unit returns was read while no slot of its mapping had begun to change, and while the writer lived.

The words are read whole, by the compiled library in an order that every processor keeps. Without it they are read from
Python, which is in that order on x86-64 alone: there loads are not exchanged with each other.
"""

from __future__ import annotations

import ctypes
import platform
import select
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from slotcar_kernels import cpu, eager, native
from slotcar_kernels.cpu import Kernel
from slotcar_kernels.plan import Plan
from slotcar_kernels.sites import SiteSlots

__all__ = ["Change", "Changed", "Guard", "GuardedBatch", "GuardedForward", "Watch", "Words", "WriterWords", "why_not"]

Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"
Words: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]"

_KEEPS_LOADS_IN_ORDER = ("x86_64", "AMD64")


class Change(IntEnum):
    """Why nothing of a unit may be used; the numbers are those of native/guard.h."""

    STALE_BEFORE = 16
    STALE_AFTER = 17
    CLOSED = 18
    OTHER_EPOCH = 19
    DISCONNECTED = 20
    GONE = 21

    @property
    def is_stale(self) -> bool:
        """The writer is there, and a slot began to change after the mapping was made."""
        return self in (Change.STALE_BEFORE, Change.STALE_AFTER)


_CHANGES = frozenset(Change)


class Changed(Exception):
    """A unit was refused; nothing that it wrote may be used."""

    def __init__(self, change: Change) -> None:
        super().__init__(change.name)
        self.change = change


class WriterWords(NamedTuple):
    """What the writer says, in shared memory: 64 bits each, aligned, and written whole."""

    epoch: Words  # two
    slots_closed: Words  # one
    region_closed: Words  # one
    mod_generations: Words  # one per slot


class _Watch(ctypes.Structure):
    _fields_ = (
        ("epoch", ctypes.c_void_p),
        ("slots_closed", ctypes.c_void_p),
        ("region_closed", ctypes.c_void_p),
        ("mod_generations", ctypes.c_void_p),
        ("wanted_epoch", ctypes.c_uint64 * 2),
        ("socket", ctypes.c_int64),
    )


class _Guard(ctypes.Structure):
    _fields_ = (
        ("watch", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_count", ctypes.c_int64),
        ("generation", ctypes.c_uint64),
        ("use", ctypes.c_void_p),
    )


def why_not() -> str:
    """Why units can't be checked here; empty when they can."""
    if native.library() is not None or platform.machine() in _KEEPS_LOADS_IN_ORDER:
        return ""
    return f"{native.backend()}, and {platform.machine()} does not keep loads in order without it"


class Watch:
    """One writer: what it says, and the connection that tells whether it lives."""

    def __init__(self, words: WriterWords, epoch: bytes, socket: int) -> None:
        """`epoch` is the one that is wanted, 16 bytes; nothing is ever sent over `socket`, which the caller closes."""
        self.words = words
        self.epoch = np.frombuffer(epoch, np.uint64)
        self.struct = _Watch(*map(_address, words), tuple(map(int, self.epoch)), socket)

    def close(self) -> None:
        """This side is about to close the socket: every unit is refused from now on, also one under way. Idempotent."""
        self.struct.socket = -1


class Guard:
    """The slots of one mapping, which was made at `generation`."""

    def __init__(self, watch: Watch, slots: Sequence[int], generation: int) -> None:
        """Raises ValueError when there is no such slot, or when `why_not` says why."""
        mods = watch.words.mod_generations
        if any(not 0 <= slot < len(mods) for slot in slots) or why_not():
            raise ValueError(why_not() or f"slots {sorted(slots)}, wanted them below {len(mods)}")
        self._watch = watch
        self._slots = np.array(slots, np.int64)
        self._generation = generation
        self._use: Words | None = None
        self._struct = _Guard(ctypes.addressof(watch.struct), _address(self._slots), len(self._slots), generation, None)
        self.address = ctypes.addressof(self._struct)
        """Of its SlotcarGuard, which lives as long."""
        self._library = native.library()

    @property
    def use(self) -> Words | None:
        """Three words in which units are counted for the writer to see: generation, units, rows. None: nowhere."""
        return self._use

    @use.setter
    def use(self, words: Words | None) -> None:
        if words is not None:
            # The generation last: before it the counts are nobody's.
            words[0], words[1], words[2] = 0, 0, 0
            words[0] = self._generation
        self._use = words
        self._struct.use = None if words is None else _address(words)

    def begin(self, rows: int) -> None:
        """A unit of `rows` rows begins. Raises Changed."""
        library = self._library
        found = self._begin_here(rows) if library is None else library.slotcar_guard_begin(self.address, rows)
        if found:
            raise Changed(Change(found))

    def end(self) -> None:
        """Everything that the unit reads has been read. Raises Changed; then nothing of it may be used."""
        library = self._library
        found = self._end_here() if library is None else library.slotcar_guard_end(self.address)
        if found:
            raise Changed(Change(found))

    # As native/guard.cpp

    def _begin_here(self, rows: int) -> int:
        found = self._change(Change.STALE_BEFORE)
        if not found and self._use is not None:
            self._use[1] += np.uint64(1)
            self._use[2] += np.uint64(rows)
        return found

    def _end_here(self) -> int:
        found = self._change(Change.STALE_AFTER)
        if not found and _is_gone(self._watch.struct.socket):
            return Change.GONE
        return found

    def _change(self, stale: Change) -> int:
        watch, words = self._watch, self._watch.words
        if words.slots_closed[0]:
            return Change.CLOSED
        if (words.epoch != watch.epoch).any():
            return Change.OTHER_EPOCH
        if words.region_closed[0]:
            return Change.DISCONNECTED
        if (words.mod_generations[self._slots] > np.uint64(self._generation)).any():
            return stale
        return 0


class GuardedBatch:
    """The index arrays of one plan, with the rank and scale of each of its segments at every site, and their guard.

    A batch is right for as long as its guard finds nothing changed.
    """

    def __init__(self, guard: Guard, plan: Plan, ranks: Array, scales: Array) -> None:
        """`ranks` and `scales` are [sites, segments]. Raises ValueError when their shapes do not fit the plan."""
        if not ranks.shape == scales.shape == (len(ranks), len(plan.segments)):
            raise ValueError(f"ranks are {ranks.shape}, scales {scales.shape}, wanted {len(plan.segments)} segments")
        self.guard = guard
        self.plan = plan
        self.ranks = np.ascontiguousarray(ranks, np.int64)
        self.scales = np.ascontiguousarray(scales, np.float32)
        self.native = native.NativePlan(plan)
        self._first = _address(self.ranks), _address(self.scales)

    def addresses(self, sites: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where the ranks, and the scales, of these sites are."""
        (ranks, scales), segments = self._first, len(self.plan.segments)
        return [ranks + 8 * segments * site for site in sites], [scales + 4 * segments * site for site in sites]

    def at(self, site: int, a: Tensor, b: Tensor) -> SiteSlots:
        """The slots of one site, with zeros for those that the batch does not use."""
        ranks, scales = [0] * len(a), [0.0] * len(a)
        for index, (slot, _, _) in enumerate(self.plan.segments):
            ranks[slot], scales[slot] = int(self.ranks[site, index]), float(self.scales[site, index])
        return SiteSlots(a, b, ranks, scales)


class GuardedForward:
    """Sites that share an input, computed for one batch after the other; each call is a unit."""

    def __init__(
        self, dtype: torch.dtype, sites: Mapping[int, tuple[Tensor, Tensor]], kernel: Kernel = cpu.BEST
    ) -> None:
        """`dtype` is that of each x; `sites` has A and B, as in SiteSlots, by their place in the ranks of each batch.

        Raises ValueError as `cpu.prepare` does.
        """
        slots = [SiteSlots(a, b, (), ()) for a, b in sites.values()]
        cpu.check_sites(dtype, slots)
        isa = cpu.isa_for(kernel, slots)
        self._dtype = dtype
        self._sites = sites
        self._shape = slots[0].a.shape
        if any(site.a.shape[:2] != self._shape[:2] for site in slots):
            raise ValueError(f"sites of {[tuple(site.a.shape) for site in slots]}, wanted as many slots and ranks")
        self._out_features = [site.out_features for site in slots]
        self._no_bases = [None] * len(slots)
        self._batch: GuardedBatch | None = None
        self._call: native.PreparedCall | None = None
        self._run: Callable[[], int]
        if isa is not None:
            self._call = native.PreparedCall(dtype, slots, (isa, kernel.threads))
            # Every output is made like these, so that only where it lies is new.
            self._call.point(torch.empty(0, 1), self._outs(0), self._no_bases)

    def __call__(self, batch: GuardedBatch, x: Tensor, bases: Sequence[Tensor] | None = None) -> list[Tensor]:
        """base + delta, or the delta, as a new [rows, out] tensor per site, in x's dtype.

        x: [rows, in]; bases: [rows, out] per site; last dimensions contiguous. Raises ValueError when something does
        not fit, and Changed, when what was read may be another adapter's.
        """
        rows, call = batch.plan.rows, self._call
        cpu.check_matrix("x", x, rows, self._shape[2], self._dtype)
        outs = self._outs(rows)
        if call is None:
            self._compute_here(batch, x, outs, self._no_bases if bases is None else self._checked(rows, bases))
            return outs
        if batch is not self._batch:
            self._use(call, batch)
        if bases is None:
            call.point_alike(x, outs)
            status = self._run()
        else:
            call.point(x, outs, self._checked(rows, bases))
            status = self._run()
            call.point(x, outs, self._no_bases)  # the next x may come without
        if status:
            raise Changed(Change(status)) if status in _CHANGES else call.refusal(status)
        return outs

    def _use(self, call: native.PreparedCall, batch: GuardedBatch) -> None:
        self._check(batch)
        call.use(batch.native, *batch.addresses(tuple(self._sites)))
        self._run = call.guarded(batch.guard.address)
        self._batch = batch  # which keeps alive what the call uses

    def _check(self, batch: GuardedBatch) -> None:
        """Raises ValueError unless the batch's slots and ranks are there at these sites."""
        slots, max_rank, _ = self._shape
        for site in self._sites:
            ranks = batch.ranks[site]
            if any(segment.slot >= slots for segment in batch.plan.segments) or ranks.max(initial=0) > max_rank:
                raise ValueError(f"ranks {ranks.tolist()} of {slots} slots, wanted them up to {max_rank}")

    def _compute_here(self, batch: GuardedBatch, x: Tensor, outs: list[Tensor], bases: Sequence[Tensor | None]) -> None:
        self._check(batch)
        sites = [batch.at(site, a, b) for site, (a, b) in self._sites.items()]
        batch.guard.begin(batch.plan.rows)
        eager.lora_forward(batch.plan, x, sites, outs, bases)
        batch.guard.end()

    def _outs(self, rows: int) -> list[Tensor]:
        dtype, empty = self._dtype, torch.empty
        return [empty(rows, features, dtype=dtype) for features in self._out_features]

    def _checked(self, rows: int, bases: Sequence[Tensor]) -> Sequence[Tensor]:
        for features, base in zip(self._out_features, bases, strict=True):
            cpu.check_matrix("base", base, rows, features, self._dtype)
        return bases


def _address(values: Array) -> int:
    address: int = values.__array_interface__["data"][0]
    return address


def _is_gone(socket: int) -> bool:
    if socket < 0:
        return True
    poll = select.poll()
    poll.register(socket, select.POLLIN | select.POLLRDHUP)
    return bool(poll.poll(0))
