"""A prepared call with the checks of the direct plane and one without: what looking at shared words costs a unit."""

from __future__ import annotations

import functools
import socket
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
    """Guarded and not; both compute the same into tensors of their own. The compiled kernel must be there."""
    words = WriterWords(*(np.zeros(count, np.uint64) for count in (2, 1, 1, len(slots.ranks))))
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guard = Guard(Watch(words, _EPOCH, ends[0].fileno()), sorted({slot for slot, _, _ in plan.segments}), 1)
    guard.use = np.zeros(3, np.uint64)
    isa = native.best_isa()
    assert isa is not None
    out = torch.empty(plan.rows, slots.out_features, dtype=x.dtype)
    calls = []
    for struct in (guard.struct, None):
        call = native.PreparedCall(plan, x.dtype, [slots], (isa, 1), struct)
        call.point(x, [out], [base])
        assert call.run() == 0
        calls.append(functools.partial(_run, call, (x, out, base, guard, ends)))
    return calls[0], calls[1]


def _run(call: native.PreparedCall, _kept_alive: object) -> int:
    return call.run()
