"""A Forward over sites of every kind, from the index work to the launches: the one copy for server and engines.

Invariant: what `aux` says of tokens and experts is read once in a run, into private memory, and checked there, before
anything is written: whoever shares that memory cannot make a run read outside of A and B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slotcar_kernels import cpu, seed
from slotcar_kernels.cpu import BEST, Kernel
from slotcar_kernels.plan import Plan, plan_by_row, slots_by_row
from slotcar_kernels.sites import SiteSlots

__all__ = ["BadAux", "NeedsBase", "PartSlots", "Prepared", "SiteCall", "prepare"]


class NeedsBase(ValueError):
    """Call number `index` has rows of a slot with a gain, and neither base nor aux."""

    def __init__(self, index: int) -> None:
        super().__init__(f"call {index} needs the base model's output")
        self.index = index


class BadAux(ValueError):
    """`aux` of call number `index` has a number that is no token's, or no expert's."""

    def __init__(self, index: int, found: int, count: int) -> None:
        super().__init__(f"aux of call {index} has {found}, wanted 0 to {count - 1}")
        self.index = index
        self.found = found
        self.wanted = f"0 to {count - 1}"


@dataclass(frozen=True, slots=True, eq=False)
class PartSlots:
    """One part of a site, as the rank that computes sees it.

    vectors: [S, 2, out] float32, gain and bias of each slot; None at a site of experts.
    flags: of each slot, the bits of `seed` for the vectors that it has.
    """

    slots: SiteSlots
    vectors: Tensor | None = None
    flags: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SiteCall:
    """One site: out = base + delta, with the parts side by side in `out`.

    out, base: [rows, out of all parts], last dimension contiguous. base None counts as zero, and may be `out` itself.
    x: [rows, in] in out's dtype; None for an embedding. Calls with the very same x are computed together.
    aux: int32 [rows, 1], token or expert of each row; at other sites None or the base model's output, like `base`.
    """

    parts: Sequence[PartSlots]
    out: Tensor
    x: Tensor | None = None
    base: Tensor | None = None
    aux: Tensor | None = None

    @property
    def indices(self) -> int:
        """How many tokens or experts there are for `aux` to name; 0 at other sites."""
        slots = self.parts[0].slots
        if slots.embedding:
            return slots.in_features
        return slots.experts if slots.b.dim() == 4 else 0


@dataclass(slots=True)
class _Group:
    """What one call of the kernel computes: a matrix of `out`, and of `base`, for each of the sites' slots."""

    seeds: list[Callable[[], None]]
    slots: list[SiteSlots]
    outs: list[Tensor]
    bases: list[Tensor | None]


def prepare(plan: Plan, calls: Sequence[SiteCall], kernel: Kernel = BEST) -> Prepared:
    """out = base + scale · (x Aᵀ) Bᵀ + gain ⊙ y_base + bias at each call's site; see `cpu.lora_forward` for the sums.

    y_base is the base, or aux where there is no base. Each run of the result computes from what tensors and slots have
    then; ranks, scales and flags are those of now. Raises NeedsBase, or ValueError when something does not fit. A run
    raises BadAux, and has written nothing then.
    """
    shared: dict[int, list[int]] = {}
    alone: list[int] = []
    for index, call in enumerate(calls):
        if call.indices:
            alone.append(index)
        else:
            shared.setdefault(id(call.x), []).append(index)
    launches = [_linear(plan, [(index, calls[index]) for index in indices], kernel) for indices in shared.values()]
    if not alone:
        return Prepared(launches)
    reads = [partial(_read, index, calls[index]) for index in alone]
    return Prepared(launches, reads, [_by_aux(plan, index, calls[index], kernel) for index in alone])


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A prepared Forward; each call computes it. `computes` take what `reads` give, in their order."""

    launches: Sequence[Callable[[], None]]
    reads: Sequence[Callable[[], Tensor]] = ()
    computes: Sequence[Callable[[Tensor], None]] = ()

    def __call__(self) -> None:
        indices = [read() for read in self.reads]
        _run(self.launches)
        for compute, of_rows in zip(self.computes, indices, strict=True):
            compute(of_rows)


def _run(launches: Sequence[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


def _linear(plan: Plan, calls: Sequence[tuple[int, SiteCall]], kernel: Kernel) -> Callable[[], None]:
    groups = [_group(plan, index, call, kernel) for index, call in calls]
    seeds = [write for group in groups for write in group.seeds]
    x = calls[0][1].x
    if x is None:
        raise ValueError(f"call {calls[0][0]} has no x")
    launch = cpu.prepare(
        plan,
        x,
        [slots for group in groups for slots in group.slots],
        [out for group in groups for out in group.outs],
        [base for group in groups for base in group.bases],
        kernel,
    )
    return partial(_run, [*seeds, launch]) if seeds else launch


def _by_aux(plan: Plan, index: int, call: SiteCall, kernel: Kernel) -> Callable[[Tensor], None]:
    group = _group(plan, index, call, kernel)
    group.slots = cpu.captured(group.slots)
    if call.parts[0].slots.embedding:
        return partial(_embed, plan, group, kernel)
    if call.x is None:
        raise ValueError(f"call {index} has no x")
    return partial(_route, slots_by_row(plan), call.x, group, kernel)


def _group(plan: Plan, index: int, call: SiteCall, kernel: Kernel) -> _Group:
    group, start, is_whole = _Group([], [], [], []), 0, len(call.parts) == 1
    y = call.aux if call.base is None and not call.indices else call.base
    for part in call.parts:
        stop = start + part.slots.out_features
        out, base, y_base = call.out, call.base, y
        if not is_whole:
            out, base, y_base = out[:, start:stop], _columns(base, start, stop), _columns(y, start, stop)
        if part.vectors is not None and seed.uses_vectors(plan, part.flags):
            if y_base is None and any(part.flags[segment.slot] & seed.GAIN for segment in plan.segments):
                raise NeedsBase(index)
            group.seeds.append(seed.prepare(plan, (part.vectors, part.flags), out, base, y_base, kernel))
            base = out
        group.slots.append(part.slots)
        group.outs.append(out)
        group.bases.append(base)
        start = stop
    return group


def _columns(of: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if of is None else of[:, start:stop]


def _read(index: int, call: SiteCall) -> Tensor:
    """int64 [rows]: a private copy of what aux says now. Raises BadAux."""
    if call.aux is None or call.aux.dtype != torch.int32 or call.aux.dim() != 2:
        raise ValueError(f"call {index} has no aux of int32 [rows, 1]")
    indices = call.aux.to(torch.int64, copy=True).reshape(-1)
    if len(indices):
        for found in map(int, torch.aminmax(indices)):
            if not 0 <= found < call.indices:
                raise BadAux(index, found, call.indices)
    return indices


def _embed(plan: Plan, group: _Group, kernel: Kernel, ids: Tensor) -> None:
    _run(group.seeds)
    cpu.lora_forward(plan, ids, group.slots, group.outs, group.bases, kernel)


def _route(slots: Tensor, x: Tensor, group: _Group, kernel: Kernel, experts: Tensor) -> None:
    """Rows sorted by slot and expert; `slots` is int64 [rows], -1 for BASE."""
    count = group.slots[0].experts
    plan = plan_by_row(torch.where(slots < 0, slots, slots * count + experts))
    cpu.lora_forward(plan, x, group.slots, group.outs, group.bases, kernel)
