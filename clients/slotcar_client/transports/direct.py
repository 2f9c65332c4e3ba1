"""Forward in this process, from the slots that the sidecar shares: each call is a unit, checked before and after.

Invariant (I2, I8): what leaves was read while no slot of its mapping had begun to change and the sidecar lived, so that
its digests are those of the mapping. Mappings are set through the ring of the same connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from slotcar.v1 import engine_service_pb2, plane_pb2
from slotcar_kernels.guard import Change, Changed, GuardedForward
from slotcar_kernels.plan import Plan, plan_rows

from slotcar_client.effects import Call, Forward, ForwardCall
from slotcar_client.errors import LayoutStale, MappingNotFound, ShapeMismatch, SlotcarError
from slotcar_client.rpc import Rpc
from slotcar_client.torch_tensors import check_sites
from slotcar_client.transports.cells import Cells, ConnectionLost
from slotcar_client.transports.connection import Connect
from slotcar_client.transports.line import Line
from slotcar_client.transports.shapes import Shape, by_dtype
from slotcar_client.transports.shared_slots import SharedSlots
from slotcar_client.values import Mapping

Outputs: TypeAlias = dict[str, torch.Tensor]

_MOST_MAPPINGS = 64
_MOST_PLANS = 16
_MOST_PREPARED = 512  # of a mapping; a decode step of a large model has about 130
_CPU = torch.device("cpu")
_LOST = {
    Change.CLOSED: "the sidecar has closed its slots",
    Change.OTHER_EPOCH: "the slots are those of another epoch",
    Change.DISCONNECTED: "the sidecar ended the connection",
    Change.GONE: "the sidecar is gone",
}


class DirectTransport:
    name = "direct"

    def __init__(self, connect: Connect, rpc: Rpc) -> None:
        self._line = Line(connect, rpc, plane_pb2.PLANE_DIRECT)
        self._slots: SharedSlots | None = None
        self._mapped: dict[int, MappedForwards] = {}

    def use(self, opened: engine_service_pb2.SessionOpened) -> None:
        self._line.use(opened)
        self._slots_of(self._line.cells)

    def forward(self, forward: Forward) -> Outputs:
        return self._line.repeated(partial(self._forward, forward))

    def send(self, forward: Forward) -> None:
        """It is computed in the caller's thread."""

    def call(self, call: Call) -> Any:
        return self._line.call(call)

    def close(self) -> None:
        if self._slots is not None:
            self._slots.watch.close()
        self._slots, self._mapped = None, {}
        self._line.close()

    def _forward(self, forward: Forward, cells: Cells) -> Outputs:
        slots, mapping = self._slots_of(cells), forward.mapping
        try:
            mapped = self._mapped.get(mapping.mapping_id)
            if mapped is None or mapped.mapping is not mapping:
                mapped = self._map(slots, mapping)
            return mapped.compute(forward.call)
        except Changed as changed:
            raise _error(changed.change, slots, mapping) from changed
        except (ValueError, KeyError):
            # These say what the client's names for it do not.
            for part in by_dtype(forward):
                Shape(part.call, mapping, slots.sites)
            raise

    def _slots_of(self, cells: Cells) -> SharedSlots:
        slots = self._slots
        if slots is None or slots.connection is not cells.connection:
            self._slots, self._mapped = None, {}
            slots = self._slots = SharedSlots(cells.connection, self._line.opened)
        return slots

    def _map(self, slots: SharedSlots, mapping: Mapping) -> MappedForwards:
        if mapping.version.epoch != slots.connection.epoch:
            raise MappingNotFound(
                f"mapping {mapping.mapping_id} is of another life of the server: set it again",
                mapping_id=mapping.mapping_id,
            )
        self._mapped.pop(mapping.mapping_id, None)
        while len(self._mapped) >= _MOST_MAPPINGS:
            del self._mapped[next(iter(self._mapped))]
        mapped = self._mapped[mapping.mapping_id] = MappedForwards(slots, mapping)
        return mapped


class MappedForwards:
    """The Forwards of one mapping at its generation; each is prepared once."""

    def __init__(self, slots: SharedSlots, mapping: Mapping) -> None:
        """Raises Changed, or AuditFailed when the answer to SetMapping does not fit the slots."""
        self.mapping = mapping
        preparation = _Preparation(slots, mapping)
        self._guard = preparation.guard
        self._uses = slots.uses
        # What prepares does not know this object: together they would not go before the next garbage collection.
        self._prepared = lru_cache(_MOST_PREPARED)(preparation.prepare)

    def compute(self, call: ForwardCall) -> Outputs:
        """{site: output}; sites whose x is the very same object are one unit.

        Raises Changed; ValueError or KeyError for what does not fit the sites.
        """
        inputs, base = call.inputs, call.base
        if base is not None or not inputs:
            check_sites(call)
        if self._guard.use is None:
            self._uses.give(self._guard)
        groups: dict[int, list[str]] = {}
        for site, x in inputs.items():
            groups.setdefault(id(x), []).append(site)
        outputs: Outputs = {}
        for sites in groups.values():
            x = inputs[sites[0]]
            forward = self._prepared(tuple(sites), call.row_counts, x.dtype)
            outs = forward(_readable(x), None if base is None else [_readable(base[site]) for site in sites])
            outputs.update(zip(sites, outs if x.is_cpu else [out.to(x.device) for out in outs], strict=True))
        return outputs


class _Preparation:
    """What the calls of a mapping have in common: its guard, its plans, and ranks and scales as they were under it."""

    def __init__(self, slots: SharedSlots, mapping: Mapping) -> None:
        used = sorted({slot for slot in mapping.slots if slot is not None})
        self.guard = slots.guard(used, mapping.generation)
        self._slots = slots
        self._parts = slots.parts(self.guard, used)
        self._plan = lru_cache(_MOST_PLANS)(partial(_plan, mapping.slots))

    def prepare(self, sites: Sequence[str], row_counts: Sequence[int], dtype: torch.dtype) -> GuardedForward:
        plan = self._plan(row_counts)
        return GuardedForward(self.guard, plan, dtype, [self._slots.site(site, self._parts) for site in sites])


def _plan(slots: Sequence[int | None], row_counts: Sequence[int]) -> Plan:
    if len(row_counts) != len(slots):
        found, wanted = f"{len(row_counts)} counts", f"{len(slots)} counts"
        raise ShapeMismatch(f"row_counts is {found}, wanted {wanted}", field="row_counts", found=found, wanted=wanted)
    return plan_rows(list(zip(slots, row_counts, strict=True)))


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that is on the CPU, each row without gaps."""
    if tensor.is_cpu and (tensor.is_contiguous() or tensor.stride()[-1:] == (1,)):
        return tensor
    return tensor.detach().to(_CPU).contiguous()


def _error(change: Change, slots: SharedSlots, mapping: Mapping) -> SlotcarError:
    """What the change is to the caller; after ConnectionLost another connection may do."""
    if not change.is_stale:
        return ConnectionLost(_LOST[change])
    changed = slots.changed_after(mapping.generation)
    stale = [str(entry) for entry, slot in zip(mapping.entries, mapping.slots, strict=True) if slot in changed]
    return LayoutStale(
        f"a slot of mapping {mapping.mapping_id} changed after generation {mapping.generation}: map again by digest",
        entries=", ".join(dict.fromkeys(stale)),
        found=slots.generation,
        wanted=mapping.generation,
    )
