"""What the Forwards of one shape look like in a region: sizes, places and the request's payload, worked out once.

Invariant: a shape is used for a call only if every tensor of the call has the size and the dtype that it was made for.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from slotcar.shm import region, slots
from slotcar.v1 import engine_service_pb2
from slotcar_kernels.buffers import DTYPE_NAMES, DTYPES

from slotcar_client.call_tensors import check_given, check_sites, dtype_of, first_tensor, sites_of
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
from slotcar_client.sites import RankSite, Sites, rank_sites
from slotcar_client.transports.arena import aligned
from slotcar_client.transports.cells import Cells
from slotcar_client.values import Mapping

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
    dtype: torch.dtype

    def there(self, arena: torch.Tensor, start: int) -> torch.Tensor:
        """It, in a block that begins at `start`."""
        offset = start + self.offset
        return arena[offset : offset + self.size.numel() * self.dtype.itemsize].view(self.dtype).view(self.size)

    def fits(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is self.dtype and tensor.shape == self.size


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
    auxs: list[_Target]
    outs: list[tuple[str, torch.Tensor]]

    def fill(self, call: ForwardCall) -> Devices:
        """Copies the inputs of a call that has this shape; returns where its outputs go, if not all are for the CPU."""
        inputs, base, all_here = call.inputs, call.base, True
        for target in self.xs:
            all_here = _copy(inputs[target.site], target) and all_here
        if base is not None:
            for target in self.bases:
                all_here = _copy(base[target.site], target) and all_here
        if call.aux is not None:
            for target in self.auxs:
                _copy(call.aux[target.site], target)
        return _HERE if all_here else _devices(call)

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
        self._dtype = dtype_of(call, sites_of(call)[0])
        self._rows = sum(call.row_counts)
        self._row_counts = call.row_counts
        self._xs: list[_Part] = []
        self._bases: list[_Part] = []
        self._auxs: list[_Part] = []
        self._outs: list[_Part] = []
        self._items: list[region.Item] = []
        self._places: dict[int, Place] = {}
        order = shared_inputs(call.inputs.items())
        for name, travels in order:
            self._add(call, name, travels, sites)
        for name in sites_of(call)[len(order) :]:
            self._add(call, name, False, sites)

    def _add(self, call: ForwardCall, name: str, travels: bool, sites: Sites) -> None:
        if name not in sites:
            raise SiteUnknown(f"the model has no site {name!r}", site=name)
        site = sites[name]
        check_given(call, name, site)
        if dtype_of(call, name) != self._dtype:
            raise MixedDtypes(f"{name} has another dtype than the first site", field=f"x of {name}")
        if name in call.inputs:
            self._check(f"x of {name}", call.inputs[name], site.in_features)
        if travels:
            self._xs.append(self._part(name, site.in_features))
        x_offset = self._xs[-1].offset if name in call.inputs else region.ABSENT
        base_offset = region.ABSENT
        if call.base is not None:
            self._check(f"base of {name}", call.base[name], site.out_features)
            self._bases.append(self._part(name, site.out_features))
            base_offset = self._bases[-1].offset
        aux, aux_offset = self._add_aux(call, name, site)
        self._outs.append(self._part(name, site.out_features))
        self._items.append(region.Item(site.number, x_offset, base_offset, self._outs[-1].offset, aux, aux_offset))

    def _add_aux(self, call: ForwardCall, name: str, site: RankSite) -> tuple[region.Aux, int]:
        if call.aux is None or name not in call.aux:
            return region.Aux.NONE, region.ABSENT
        self._auxs.append(self._indices(name) if site.indices else self._part(name, site.out_features))
        return region.Aux.INDICES if site.indices else region.Aux.OUTPUT, self._auxs[-1].offset

    def _part(self, name: str, features: int) -> _Part:
        return self._placed_next(name, torch.Size((self._rows, features)), self._dtype)

    def _indices(self, name: str) -> _Part:
        return self._placed_next(name, torch.Size((self._rows,)), torch.int32)

    def _placed_next(self, name: str, size: torch.Size, dtype: torch.dtype) -> _Part:
        part = _Part(name, self.bytes, size, dtype)
        self.bytes += aligned(size.numel() * dtype.itemsize)
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
        dtype, inputs, base, aux = self._dtype, call.inputs, call.base, call.aux
        for site, _, size, _ in self._xs:
            tensor = inputs[site]
            if tensor.dtype is not dtype or tensor.shape != size:
                return False
        if aux is not None and not all(part.fits(aux[part.site]) for part in self._auxs):
            return False
        if aux is not None and any(dtype_of(call, out.site) is not dtype for out in self._outs):
            return False
        if base is None:
            return True
        sites = inputs.keys() if aux is None else set(sites_of(call))
        return base.keys() == sites and all(
            base[site].dtype is dtype and base[site].shape == size for site, _, size, _ in self._bases
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
        def targets(parts: list[_Part]) -> list[_Target]:
            there = [(part.site, part.there(arena, start)) for part in parts]
            return [_Target(site, to, to.data_ptr(), to.nbytes) for site, to in there]

        outs = [(part.site, part.there(arena, start)) for part in self._outs]
        xs, bases, auxs = map(targets, (self._xs, self._bases, self._auxs))
        return Place(self._request(start).pack(), xs, bases, auxs, outs)

    def _request(self, start: int) -> region.Forward:
        dtype = slots.DTYPES.index(DTYPE_NAMES[self._dtype])
        items = [item.at(start) for item in self._items]
        return region.Forward(self.mapping.mapping_id, self.mapping.generation, dtype, self._row_counts, items)


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
        self._sites = rank_sites(opened.model_spec)
        self._shapes: dict[object, Shape] = {}

    def of(self, forward: Forward) -> Shape:
        """Raises MappingNotFound for a mapping of another epoch, and as Shape does."""
        call, mapping = forward.call, forward.mapping
        key = id(mapping), call.row_counts, call.base is None, _sites(call), call.aux and tuple(call.aux)
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
    for site in sites_of(call):
        sites.setdefault(dtype_of(call, site), []).append(site)
    return [replace(forward, call=_part_of(call, names)) for names in sites.values()]


def _part_of(call: ForwardCall, sites: list[str]) -> ForwardCall:
    inputs, base, aux = (
        None if tensors is None else {site: tensors[site] for site in sites if site in tensors}
        for tensors in (call.inputs, call.base, call.aux)
    )
    return replace(call, inputs=inputs or {}, base=base, aux=aux)


def _devices(call: ForwardCall) -> Devices:
    first = {site: first_tensor(call, site) for site in sites_of(call)}
    return {site: tensor.device for site, tensor in first.items() if not tensor.is_cpu}


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
