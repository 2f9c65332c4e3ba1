"""What the Forwards of one shape look like in a region: sizes, places and the request's payload, worked out once.

Invariant: a shape is used for a call only if every tensor of the call has the size and the dtype that it was made for.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from slotcar.shm import region, slots
from slotcar.v1 import engine_service_pb2, model_pb2
from slotcar_kernels.buffers import DTYPE_NAMES, DTYPES

from slotcar_client.effects import Forward, ForwardCall
from slotcar_client.errors import (
    AuditFailed,
    CapacityExceeded,
    MappingNotFound,
    ModelUnknown,
    ShapeMismatch,
    SiteUnknown,
)
from slotcar_client.protocol import shared_inputs
from slotcar_client.torch_tensors import check_sites
from slotcar_client.transports.arena import aligned
from slotcar_client.transports.cells import Cells
from slotcar_client.values import Mapping

# Each site of the model with its index in it.
Sites: TypeAlias = dict[str, tuple[int, model_pb2.Site]]

# Where the outputs of the sites go that are not for the CPU.
Devices: TypeAlias = dict[str, torch.device]

_HERE: Devices = {}
_MAX_SHAPES = 1024
_MAX_PLACES = 64


class _Part(NamedTuple):
    """One tensor in the block of a call: the site that it is of, and how far from the start of the block it is."""

    site: str
    offset: int
    size: torch.Size


class _Target(NamedTuple):
    """Where an input of a site is copied to."""

    site: str
    tensor: torch.Tensor
    address: int
    bytes: int


class Place(NamedTuple):
    """The block of a call at one place of the arena: the request's payload, where the tensors go, and the outputs."""

    payload: bytes
    xs: list[_Target]
    bases: list[_Target]
    outs: list[tuple[str, torch.Tensor]]

    def fill(self, call: ForwardCall) -> Devices:
        """Copies the inputs of a call that has this shape; returns where its outputs go, if not all are for the CPU."""
        inputs, base, all_here = call.inputs, call.base, True
        for target in self.xs:
            all_here = _copy(inputs[target.site], target) and all_here
        if base is not None:
            for target in self.bases:
                _copy(base[target.site], target)
        return _HERE if all_here else {site: x.device for site, x in inputs.items() if not x.is_cpu}

    def outputs(self, devices: Devices) -> dict[str, torch.Tensor]:
        """{site: output}, each a tensor of its own."""
        outputs = {site: out.clone() for site, out in self.outs}
        for site, device in devices.items():
            outputs[site] = outputs[site].to(device)
        return outputs


class MixedDtypes(ShapeMismatch):
    """The inputs have several dtypes; a request has one, so this is as many calls."""


class Shape:
    """`bytes` is how much of the arena a call takes."""

    def __init__(self, call: ForwardCall, mapping: Mapping, sites: Sites) -> None:
        """Raises MixedDtypes, or RequestInvalid, ShapeMismatch or SiteUnknown for tensors that do not fit the sites."""
        check_sites(call)
        self.mapping = mapping
        self.bytes = 0
        self._fingerprint = region.fingerprint(mapping.entry_digests)
        self._dtype = next(iter(call.inputs.values())).dtype
        self._rows = sum(call.row_counts)
        self._row_counts = call.row_counts
        self._xs: list[_Part] = []
        self._bases: list[_Part] = []
        self._outs: list[_Part] = []
        self._items: list[region.Item] = []
        self._places: dict[int, Place] = {}
        for name, travels in shared_inputs(call.inputs.items()):
            self._add(call, name, travels, sites)

    def _add(self, call: ForwardCall, name: str, travels: bool, sites: Sites) -> None:
        if name not in sites:
            raise SiteUnknown(f"the model has no site {name!r}", site=name)
        index, site = sites[name]
        if call.inputs[name].dtype != self._dtype:
            raise MixedDtypes(f"x of {name} has another dtype than the first", field=f"x of {name}")
        self._check(f"x of {name}", call.inputs[name], site.in_features)
        if travels:
            self._xs.append(self._part(name, site.in_features))
        base_offset = region.NO_BASE
        if call.base is not None:
            self._check(f"base of {name}", call.base[name], site.out_features)
            self._bases.append(self._part(name, site.out_features))
            base_offset = self._bases[-1].offset
        self._outs.append(self._part(name, site.out_features))
        self._items.append(region.Item(index, self._xs[-1].offset, base_offset, self._outs[-1].offset))

    def _part(self, name: str, features: int) -> _Part:
        part = _Part(name, self.bytes, torch.Size((self._rows, features)))
        self.bytes += aligned(part.size.numel() * self._dtype.itemsize)
        return part

    def _check(self, field: str, tensor: torch.Tensor, features: int) -> None:
        found, wanted = list(tensor.shape), [self._rows, features]
        if found != wanted:
            raise ShapeMismatch(f"{field} is {found}, wanted {wanted}", field=field, found=found, wanted=wanted)
        if tensor.dtype != self._dtype:
            raise _wrong_dtype(field, tensor.dtype, str(self._dtype).removeprefix("torch."))
        if tensor.dtype not in DTYPE_NAMES:
            raise _wrong_dtype(field, tensor.dtype, " or ".join(DTYPES))

    def fits(self, call: ForwardCall) -> bool:
        """Whether the tensors have the sizes and the dtype of this shape."""
        dtype, inputs, base = self._dtype, call.inputs, call.base
        for site, _, size in self._xs:
            tensor = inputs[site]
            if tensor.dtype is not dtype or tensor.shape != size:
                return False
        return base is None or (
            base.keys() == inputs.keys()
            and all(base[site].dtype is dtype and base[site].shape == size for site, _, size in self._bases)
        )

    @property
    def payload_bytes(self) -> int:
        return len(self._request(0).pack())

    def audit(self, fingerprint: int) -> None:
        """Raises AuditFailed unless the answer was computed with the digests of the mapping."""
        if fingerprint != self._fingerprint:
            raise AuditFailed(
                "the server computed with other digests than the mapping's",
                found=f"{fingerprint:016x}",
                wanted=f"{self._fingerprint:016x}",
            )

    def place(self, arena: torch.Tensor, start: int) -> Place:
        """A call whose block begins at `start` of the arena."""
        place = self._places.get(start)
        if place is None:
            while len(self._places) >= _MAX_PLACES:
                del self._places[next(iter(self._places))]
            place = self._places[start] = self._placed(arena, start)
        return place

    def _placed(self, arena: torch.Tensor, start: int) -> Place:
        def at(parts: list[_Part]) -> list[tuple[str, torch.Tensor]]:
            return [(part.site, self._tensor(arena, start + part.offset, part.size)) for part in parts]

        xs, bases = (
            [_Target(site, to, to.data_ptr(), to.nbytes) for site, to in at(parts)] for parts in (self._xs, self._bases)
        )
        return Place(self._request(start).pack(), xs, bases, at(self._outs))

    def _request(self, start: int) -> region.Forward:
        items = [
            region.Item(site, x + start, base if base == region.NO_BASE else base + start, out + start)
            for site, x, base, out in self._items
        ]
        dtype = slots.DTYPES.index(DTYPE_NAMES[self._dtype])
        return region.Forward(self.mapping.mapping_id, self.mapping.generation, dtype, self._row_counts, items)

    def _tensor(self, arena: torch.Tensor, offset: int, size: torch.Size) -> torch.Tensor:
        return arena[offset : offset + size.numel() * self._dtype.itemsize].view(self._dtype).view(size)


class Shapes:
    """The shapes of the calls over one connection; those of earlier ones are forgotten, the oldest first."""

    def __init__(self, opened: engine_service_pb2.SessionOpened, cells: Cells) -> None:
        """Raises ModelUnknown."""
        if not opened.HasField("model_spec"):
            raise ModelUnknown(
                "the server knew no model when the session was opened: open it with a model_spec, or once more now"
            )
        geometry = cells.connection.geometry
        self.cells = cells
        self.arena = torch.frombuffer(
            cells.connection.region, dtype=torch.uint8, count=geometry.arena_bytes, offset=geometry.arena_offset
        )
        self._epoch = opened.layout.version.epoch
        self._sites: Sites = {site.name: (index, site) for index, site in enumerate(opened.model_spec.sites)}
        self._shapes: dict[object, Shape] = {}

    def of(self, forward: Forward) -> Shape:
        """Raises MappingNotFound for a mapping of another epoch, and as Shape does."""
        call, mapping = forward.call, forward.mapping
        key = id(mapping), call.row_counts, call.base is None, _sites(call)
        shape = self._shapes.get(key)
        if shape is None or shape.mapping is not mapping or not shape.fits(call):
            shape = self._made(call, mapping)
            self._shapes.pop(key, None)
            while len(self._shapes) >= _MAX_SHAPES:
                del self._shapes[next(iter(self._shapes))]
            self._shapes[key] = shape
        return shape

    def _made(self, call: ForwardCall, mapping: Mapping) -> Shape:
        if mapping.version.epoch != self._epoch:
            raise MappingNotFound(
                f"mapping {mapping.mapping_id} is of another life of the server: set it again",
                mapping_id=mapping.mapping_id,
            )
        shape = Shape(call, mapping, self._sites)
        if shape.payload_bytes > self.cells.payload_bytes:
            raise CapacityExceeded(
                f"a Forward of {len(call.row_counts)} entries has {shape.payload_bytes} bytes, a cell of the ring only "
                f"{self.cells.payload_bytes}: use fewer entries or sites, or the stream",
                found=shape.payload_bytes,
                wanted=self.cells.payload_bytes,
            )
        return shape


def _sites(call: ForwardCall) -> object:
    """The sites, each with the first one that has the very same x."""
    inputs = call.inputs
    if len(inputs) == 1:
        return next(iter(inputs))
    first: dict[int, str] = {}
    return tuple([(site, first.setdefault(id(x), site)) for site, x in inputs.items()])


def by_dtype(forward: Forward) -> list[Forward]:
    """The same as Forwards of one dtype each."""
    call = forward.call
    sites: dict[torch.dtype, list[str]] = {}
    for site, x in call.inputs.items():
        sites.setdefault(x.dtype, []).append(site)
    return [replace(forward, call=_part_of(call, names)) for names in sites.values()]


def _part_of(call: ForwardCall, sites: list[str]) -> ForwardCall:
    base = None if call.base is None else {site: call.base[site] for site in sites}
    return ForwardCall({site: call.inputs[site] for site in sites}, call.row_counts, base)


def _copy(tensor: torch.Tensor, target: _Target) -> bool:
    """Returns whether the tensor was on the CPU."""
    here = tensor.is_cpu
    if here and tensor.is_contiguous():
        ctypes.memmove(target.address, tensor.data_ptr(), target.bytes)
    else:
        target.tensor.copy_(tensor.detach())
    return here


def _wrong_dtype(field: str, found: torch.dtype, wanted: str) -> ShapeMismatch:
    name = str(found).removeprefix("torch.")
    return ShapeMismatch(f"{field} is {name}, wanted {wanted}", field=field, found=name, wanted=wanted)
