"""A prepared call with the checks of the direct plane and one without: what looking at shared words costs a unit."""

from __future__ import annotations

import functools
import socket
from array import array
from collections.abc import Callable

import numpy as np
import torch
from slotcar_kernels import native
from slotcar_kernels.guard import Guard, Watch, WriterWords
from slotcar_kernels.plan import Plan
from slotcar_kernels.sites import SiteSlots

__all__ = ["prepared_calls"]

_EPOCH = bytes(16)


def prepared_calls(
    plan: Plan, x: torch.Tensor, slots: SiteSlots, base: torch.Tensor | None
) -> tuple[Callable[[], int], Callable[[], int]]:
    """One prepared call, guarded and not. The compiled kernel must be there."""
    words = WriterWords(*(np.zeros(count, np.uint64) for count in (2, 1, 1, len(slots.ranks))))
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    used = [slot for slot, _, _ in plan.segments]
    guard = Guard(Watch(words, _EPOCH, ends[0].fileno()), used, generation=1)
    guard.use = np.zeros(3, np.uint64)
    isa = native.best_isa()
    assert isa is not None
    native_plan, call = native.NativePlan(plan), native.PreparedCall(x.dtype, [slots], (isa, 1))
    ranks, scales = (
        array(kind, [each[slot] for slot in used]) for kind, each in (("q", slots.ranks), ("f", slots.scales))
    )
    out = torch.empty(plan.rows, slots.out_features, dtype=x.dtype)
    call.use(native_plan, [native.address(ranks)], [native.address(scales)])
    call.point(x, [out], [base])
    kept_alive = native_plan, call, slots, ranks, scales, x, out, base, guard, ends
    guarded = call.guarded(guard.address)
    assert call.run() == guarded() == 0
    return functools.partial(_run, guarded, kept_alive), functools.partial(_run, call.run, kept_alive)


def _run(run: Callable[[], int], _kept_alive: object) -> int:
    return run()
