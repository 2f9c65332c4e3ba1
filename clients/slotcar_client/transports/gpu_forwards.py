"""Forward from slots on a GPU, with slotcar's kernels in this process, on the caller's current stream.

Invariant (I2, I8): an output leaves only by `GpuSent`, which looks at the slots' words once the kernels are complete.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from slotcar_kernels.guard import Changed
from slotcar_kernels.moved import Moved
from slotcar_kernels.seed import GAIN
from slotcar_kernels.triton import SlicePart
from slotcar_kernels.triton.units import Unit, UnitBatch, Units, UnitSite

from slotcar_client.call_tensors import dtype_of, first_tensor, sites_of
from slotcar_client.effects import Forward
from slotcar_client.errors import RequestInvalid
from slotcar_client.transports.cells import ConnectionLost
from slotcar_client.transports.mapped import PerMapping, check_counts, error_of, keep
from slotcar_client.transports.shapes import Shape, by_dtype
from slotcar_client.transports.shared_slots import LeafView, Parts, SharedSlots
from slotcar_client.values import Mapping

__all__ = ["GpuForwards", "GpuSent"]

Outputs: TypeAlias = dict[str, torch.Tensor]

_MOST_BATCHES = 16  # of a mapping


class GpuForwards:
    """The Forwards over one connection's slots. Each call is a unit."""

    def __init__(self, slots: SharedSlots) -> None:
        assert slots.gpu is not None, "the slots are on one"
        self.slots = slots
        self._units = Units(slots.gpu.stream, slots.slot_count)
        self._mapped: PerMapping[MappedRows] = PerMapping(slots)

    def compute(self, forward: Forward) -> Outputs:
        """{site: output}. Raises Changed, or SlotcarError."""
        return self.begin(forward).take()

    def begin(self, forward: Forward) -> GpuSent:
        """Launches it. Raises Changed, or SlotcarError."""
        for part in by_dtype(forward):
            Shape(part.call, part.mapping, self.slots.sites)
        mapped = self._mapped.of(forward.mapping, MappedRows)
        batch = mapped.batch(self._units, forward.call.row_counts)
        sites = {site: self._site(forward, site, mapped, batch) for site in sites_of(forward.call)}
        return GpuSent(self._units.begin(batch, list(sites.values())), forward, self.slots)

    def _site(self, forward: Forward, name: str, mapped: MappedRows, batch: UnitBatch) -> UnitSite:
        call, site = forward.call, mapped.site(name, forward.rank)
        base, aux = (None if tensors is None else tensors.get(name) for tensors in (call.base, call.aux))
        is_index = self.slots.sites[name].indices > 0
        y = aux if base is None and not is_index else base
        present = set(batch.slots)
        moved = [part for part in site.moved if not present.isdisjoint(part.flags)]
        if y is None and any(part.flags.get(slot, 0) & GAIN for part in moved for slot in present):
            field, wanted = f"aux of {name}", "the base model's output, which an adapter needs"
            raise RequestInvalid(f"{field} is absent, wanted {wanted}", field=field, found="nothing", wanted=wanted)
        return UnitSite(
            site.parts, dtype_of(call, name), call.inputs.get(name), base, aux if is_index else None, y, moved
        )


class GpuSent:
    """A Forward that was launched."""

    def __init__(self, unit: Unit, forward: Forward, slots: SharedSlots) -> None:
        self._unit = unit
        self._forward = forward
        self._slots = slots

    def done(self) -> bool:
        return self._unit.is_done()

    def collect(self, timeout_seconds: float) -> Outputs | None:  # noqa: ARG002 - a wait for an event has no end
        try:
            return self.take()
        except Changed as changed:
            error = error_of(changed.change, self._slots, self._forward.mapping)
            if isinstance(error, ConnectionLost):
                return None
            raise error from changed
        except ConnectionLost:
            return None

    def take(self) -> Outputs:
        """{site: output}, once the kernels are complete. Raises Changed, or ConnectionLost."""
        outs, call = self._unit.take(), self._forward.call
        if self._slots.connection.ended:  # by this side: the words say nothing of that, and the socket is gone
            raise ConnectionLost("the connection that the slots came over has ended")
        sites = sites_of(call)
        return {site: out.to(first_tensor(call, site).device) for site, out in zip(sites, outs, strict=True)}


class MappedSite(NamedTuple):
    """A site as a rank sees it: `moved` are its parts of whose slots some have vectors."""

    parts: list[SlicePart]
    moved: list[Moved]


class MappedRows:
    """The batches of one mapping at its generation: one for each row counts that its calls have.

    Ranks and scales are copies of its own, which stay what they are when a slot begins to change.
    """

    def __init__(self, slots: SharedSlots, mapping: Mapping) -> None:
        """Raises Changed, or AuditFailed when the answer to SetMapping does not fit the slots."""
        assert slots.gpu is not None, "they are on one"
        self._slots = slots
        self._mapping = mapping
        used = sorted({slot for slot in mapping.slots if slot is not None})
        self._guard = slots.guard(used, mapping.generation)
        self._parts = slots.parts(self._guard, used)
        self._ranks, self._scales = _tables(slots, self._parts, slots.gpu.stream.device)
        self._batches: dict[tuple[int, ...], UnitBatch] = {}
        self._sites: dict[tuple[str, int], MappedSite] = {}

    def batch(self, units: Units, row_counts: tuple[int, ...]) -> UnitBatch:
        """Raises ShapeMismatch."""
        if self._guard.use is None:
            self._slots.uses.give(self._guard)
        batch = self._batches.get(row_counts)
        if batch is None:
            check_counts(self._mapping, row_counts)
            counted = zip(self._mapping.slots, row_counts, strict=True)
            rows = [-1 if slot is None else slot for slot, count in counted for _ in range(count)]
            batch = keep(self._batches, row_counts, units.batch(self._guard, rows), _MOST_BATCHES)
        return batch

    def site(self, name: str, rank: int) -> MappedSite:
        """Raises RequestInvalid for a rank that the model does not have."""
        found = self._sites.get((name, rank))
        if found is None:
            found = self._sites[name, rank] = self._made(name, rank)
        return found

    def _made(self, name: str, rank: int) -> MappedSite:
        site, column, count = MappedSite([], []), 0, self._slots.slot_count
        for view in self._slots.views(name, rank):
            places = slice(count * view.parts.start, count * view.parts.stop)
            site.parts.append(SlicePart(view.a, view.b, self._ranks[places], self._scales[places]))
            columns = slice(column, column + view.b.shape[-1])
            flags = self._flags(view)
            if flags and view.vectors is not None:
                site.moved.append(Moved(columns, view.vectors, flags))
            column = columns.stop
        return site

    def _flags(self, view: LeafView) -> dict[int, int]:
        """Of the mapping's slots that have vectors here."""
        values = zip(self._parts.used, self._parts.flags[:, view.parts.start].tolist(), strict=True)
        return {slot: flag for slot, value in values if (flag := view.at.flags(view.leaf, value))}


def _tables(slots: SharedSlots, parts: Parts, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ranks and float32 scales on the device: of each leaf, of each slot, of each of its experts."""
    made = []
    for values, dtype in ((parts.ranks, np.int32), (parts.scales, np.float32)):
        spread = np.zeros((slots.slot_count, values.shape[1]), dtype)
        spread[list(parts.used)] = values
        leaves = [spread[:, of_leaf].reshape(-1) for of_leaf in slots.part_slices]
        made.append(torch.from_numpy(np.concatenate(leaves)).to(device))
    ranks, scales = made
    return ranks, scales
