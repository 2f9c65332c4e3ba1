"""The batches of the interpreter's sweep, computed on the device: same cases, same poison, same truth.

Tests keep their tensors on the CPU. Each run copies them with all that surrounds them to twins on the device, launches
there, and copies `out` back with its surroundings, so that what must not be written is looked at too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from slotcar_kernels.triton import BatchPlan, Prepared, SiteCall, SlicePart, planes_elements, prepare

from tests.gpu.place import DEVICE, twin, whole
from tests.kernels.triton.interpreted.batch import GARBAGE, Batch
from tests.tolerances import assert_same_bits

__all__ = ["Mirrored", "TwinBatch", "TwinPlan"]


class TwinPlan(BatchPlan):
    """A plan on the device that takes aux from where tests have it."""

    def routed(self, aux: torch.Tensor, limit: int, experts: int = 1) -> BatchPlan:
        return BatchPlan.routed(self, twin(aux), limit, experts)


class Mirrored:
    """A site prepared on the device; for the rest it is what `prepare` has returned."""

    def __init__(self, prepared: Prepared, tensors: dict[str, torch.Tensor | None]) -> None:
        self._prepared = prepared
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def __getattr__(self, name: str) -> object:
        return getattr(self._prepared, name)

    def execute(self) -> None:
        call = self._prepared.call
        for name, tensor in self._tensors.items():
            whole(getattr(call, name)).copy_(whole(tensor))
        self._prepared.execute()
        for name, tensor in self._tensors.items():
            if name == "out":
                whole(tensor).copy_(whole(call.out))
            elif getattr(call, name) is not call.out:
                assert_same_bits(whole(getattr(call, name)).cpu(), whole(tensor))


class TwinBatch(Batch):
    """A batch of the sweep whose launches are on the device."""

    def prepare(self) -> tuple[BatchPlan, Prepared]:
        plan, given = _garbage_plan(self.bucket, self.sites[0].b.shape[0]), self.call()
        call = _twin_call(given)
        planes = torch.full((max(planes_elements(plan, call), 1),), torch.nan, device=DEVICE)
        tensors = {"x": given.x, "out": given.out, "aux": given.aux, "base": given.base}
        return plan, Mirrored(prepare(plan, call, planes), tensors)  # type: ignore[return-value]


def _garbage_plan(bucket: int, slots: int) -> BatchPlan:
    plan = BatchPlan.of_bucket(bucket, slots, DEVICE)
    for buffer in (plan.keys, plan.order, plan.segments, plan.tiles, plan.counts, plan.faults):
        buffer.fill_(GARBAGE)
    return plan


def _twin_call(given: SiteCall) -> SiteCall:
    parts = [SlicePart(twin(part.a), twin(part.b), twin(part.ranks), twin(part.scales)) for part in given.parts]
    out = twin(given.out)
    base = out if given.base is given.out else _maybe(given.base)
    return replace(given, parts=parts, out=out, x=_maybe(given.x), base=base, aux=_maybe(given.aux))


def _maybe(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else twin(tensor)
