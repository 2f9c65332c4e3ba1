"""Forward in this process, from the slots that the sidecar shares: each call is a unit, checked before and after.

Invariant (I2, I8): what leaves was read while no slot of its mapping had begun to change and the sidecar lived, so that
its digests are those of the mapping. Mappings are set through the ring of the same connection.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from slotcar.v1 import engine_service_pb2, plane_pb2
from slotcar_kernels.forward import NeedsBase, PartSlots, SiteCall, prepare
from slotcar_kernels.guard import Changed, GuardedBatch
from slotcar_kernels.plan import plan_rows

from slotcar_client.call_tensors import check_sites, dtype_of, first_tensor, sites_of
from slotcar_client.effects import Call, Forward, ForwardCall
from slotcar_client.errors import RequestInvalid, SlotcarError
from slotcar_client.rpc import Rpc
from slotcar_client.transports.cells import Cells, ConnectionLost
from slotcar_client.transports.connection import Connect
from slotcar_client.transports.line import Line
from slotcar_client.transports.mapped import PerMapping, check_counts, error_of, keep
from slotcar_client.transports.shapes import Shape, by_dtype
from slotcar_client.transports.shared_slots import SharedSlots
from slotcar_client.values import Mapping

if TYPE_CHECKING:
    from slotcar_client.transports.gpu_forwards import GpuForwards, GpuSent

Outputs: TypeAlias = dict[str, torch.Tensor]

_MOST_BATCHES = 16  # of a mapping
_MOST_SITES = 1024  # a decode step of a large model has about 130
_CPU = torch.device("cpu")


class DirectTransport:
    name = "direct"

    def __init__(self, connect: Connect, rpc: Rpc) -> None:
        self._line = Line(connect, rpc, plane_pb2.PLANE_DIRECT)
        self._forwards: SlotsForwards | GpuForwards | None = None

    def use(self, opened: engine_service_pb2.SessionOpened) -> None:
        self._line.use(opened)
        self._forwards_of(self._line.cells)

    def forward(self, forward: Forward) -> Outputs:
        return self._line.repeated(partial(self._forward, forward))

    def send(self, forward: Forward) -> GpuSent | None:
        """It is launched on the slots' GPU, or computed in the caller's thread."""
        if isinstance(self._forwards, SlotsForwards):
            return None
        return self._line.repeated(partial(self._send, forward))

    def call(self, call: Call) -> Any:
        return self._line.call(call)

    def close(self) -> None:
        self._drop()
        self._line.close()

    def _forward(self, forward: Forward, cells: Cells) -> Outputs:
        forwards = self._forwards_of(cells)
        try:
            return forwards.compute(forward)
        except Changed as changed:
            raise self._error(changed, forwards, forward) from changed
        except (ValueError, KeyError):
            # These say what the client's names for it do not.
            for part in by_dtype(forward):
                Shape(part.call, part.mapping, forwards.slots.sites)
            raise

    def _send(self, forward: Forward, cells: Cells) -> GpuSent | None:
        forwards = self._forwards_of(cells)
        if isinstance(forwards, SlotsForwards):
            return None
        try:
            return forwards.begin(forward)
        except Changed as changed:
            raise self._error(changed, forwards, forward) from changed

    def _error(self, changed: Changed, forwards: SlotsForwards | GpuForwards, forward: Forward) -> SlotcarError:
        error = error_of(changed.change, forwards.slots, forward.mapping)
        if isinstance(error, ConnectionLost):
            self._drop()  # a server that starts now may need the memory
        return error

    def _forwards_of(self, cells: Cells) -> SlotsForwards | GpuForwards:
        forwards = self._forwards
        if forwards is None or forwards.slots.connection is not cells.connection:
            self._drop()  # first, so that the memory of before goes
            slots = SharedSlots(cells.connection, self._line.opened)
            forwards = self._forwards = SlotsForwards(slots) if slots.gpu is None else _on_gpu(slots)
        return forwards

    def _drop(self) -> None:
        """Nothing that is under way is believed any more: soon the number of its socket may be another's."""
        if self._forwards is not None:
            self._forwards.slots.close()
        self._forwards = None


def _on_gpu(slots: SharedSlots) -> GpuForwards:
    from slotcar_client.transports.gpu_forwards import GpuForwards  # which needs Triton

    return GpuForwards(slots)


class SlotsForwards:
    """The Forwards over one connection's slots: those of sites are prepared once, those of mappings once for each.

    Nothing here is known to what it knows, so that the memory goes with it and not with a garbage collection.
    """

    def __init__(self, slots: SharedSlots) -> None:
        self.slots = slots
        self._at = lru_cache(_MOST_SITES)(slots.forward)
        # What the prepared call of the kernel does: one matrix times two.
        self._plain = frozenset(
            name for name, site in slots.sites.items() if not site.indices and len(slots.leaves[name]) == 1
        )
        self._mapped: PerMapping[MappedBatches] = PerMapping(slots)

    def compute(self, forward: Forward) -> Outputs:
        """{site: output}; sites whose x is the very same object are one unit.

        Raises Changed, ValueError or KeyError for what does not fit the sites, or SlotcarError.
        """
        call, mapping = forward.call, forward.mapping
        inputs, base = call.inputs, call.base
        if base is not None or not inputs:
            check_sites(call)
        mapped = self._mapped.of(mapping, MappedBatches)
        batch = mapped.batch(call.row_counts)
        if call.aux is not None or not self._plain.issuperset(inputs) or not mapped.with_vectors.isdisjoint(inputs):
            return self._compute_any(forward, mapped, batch)
        groups: dict[int, list[str]] = {}
        for site, x in inputs.items():
            groups.setdefault(id(x), []).append(site)
        outputs: Outputs = {}
        for sites in groups.values():
            x = inputs[sites[0]]
            compute = self._at(tuple(sites), x.dtype, forward.rank)
            outs = compute(batch, _readable(x), None if base is None else [_readable(base[site]) for site in sites])
            outputs.update(zip(sites, outs if x.is_cpu else [out.to(x.device) for out in outs], strict=True))
        return outputs

    def _compute_any(self, forward: Forward, mapped: MappedBatches, batch: GuardedBatch) -> Outputs:
        """The same for sites of every kind, the whole call as one unit."""
        call, rows = forward.call, batch.plan.rows
        sites = sites_of(call)
        for part in by_dtype(forward):
            Shape(part.call, part.mapping, self.slots.sites)
        calls = _site_calls(call, {site: mapped.part_slots(site, forward.rank) for site in sites}, rows)
        try:
            run = prepare(batch.plan, calls)
        except NeedsBase as error:
            field, wanted = f"aux of {sites[error.index]}", "the base model's output, which an adapter needs"
            raise RequestInvalid(
                f"{field} is absent, wanted {wanted}", field=field, found="nothing", wanted=wanted
            ) from error
        batch.guard.begin(rows)
        run()
        batch.guard.end()
        return {site: made.out.to(first_tensor(call, site).device) for site, made in zip(sites, calls, strict=True)}


class MappedBatches:
    """The batches of one mapping at its generation: one for each row counts that its calls have."""

    def __init__(self, slots: SharedSlots, mapping: Mapping) -> None:
        """Raises Changed, or AuditFailed when the answer to SetMapping does not fit the slots."""
        self._mapping = mapping
        used = sorted({slot for slot in mapping.slots if slot is not None})
        self._guard = slots.guard(used, mapping.generation)
        self._parts = slots.parts(self._guard, used)
        self._uses = slots.uses
        self._part_slots = slots.part_slots
        self._batches: dict[tuple[int, ...], GuardedBatch] = {}
        self._known: dict[tuple[str, int], list[PartSlots]] = {}
        self.with_vectors = slots.sites_with_vectors(self._parts)
        """The sites at which a slot of the mapping has some."""

    def batch(self, row_counts: tuple[int, ...]) -> GuardedBatch:
        """Raises ShapeMismatch."""
        if self._guard.use is None:
            self._uses.give(self._guard)
        batch = self._batches.get(row_counts)
        if batch is None:
            batch = keep(self._batches, row_counts, self._made(row_counts), _MOST_BATCHES)
        return batch

    def part_slots(self, site: str, rank: int) -> list[PartSlots]:
        """Of a site of any kind. Raises RequestInvalid for a rank that the model does not have."""
        known = self._known.get((site, rank))
        if known is None:
            known = self._known[site, rank] = self._part_slots(site, self._parts, rank)
        return known

    def _made(self, row_counts: tuple[int, ...]) -> GuardedBatch:
        check_counts(self._mapping, row_counts)
        plan = plan_rows(list(zip(self._mapping.slots, row_counts, strict=True)))
        parts = self._parts
        rows = parts.rows([segment.slot for segment in plan.segments])
        return GuardedBatch(self._guard, plan, parts.ranks[rows].T, parts.scales[rows].T)


def _site_calls(call: ForwardCall, parts: dict[str, list[PartSlots]], rows: int) -> list[SiteCall]:
    """Sites with the very same x have it in their calls too."""
    readable: dict[int, torch.Tensor] = {}
    made = []
    for site, slots in parts.items():
        x = call.inputs.get(site)
        out_features = sum(part.slots.out_features for part in slots)
        aux = None if call.aux is None else call.aux.get(site)
        if aux is not None:
            aux = aux.unsqueeze(1) if aux.dtype is torch.int32 else _readable(aux)
        made.append(
            SiteCall(
                slots,
                torch.empty(rows, out_features, dtype=dtype_of(call, site)),
                None if x is None else readable.setdefault(id(x), _readable(x)),
                None if call.base is None else _readable(call.base[site]),
                aux,
            )
        )
    return made


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that is on the CPU, each row without gaps."""
    if tensor.is_cpu and (tensor.is_contiguous() or tensor.stride()[-1:] == (1,)):
        return tensor
    return tensor.detach().to(_CPU).contiguous()
