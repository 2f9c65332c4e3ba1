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
from slotcar_client.errors import AuditFailed, MappingNotFound, ModelUnknown, ShapeMismatch, SiteUnknown
from slotcar_client.protocol import shared_inputs
from slotcar_client.torch_tensors import check_sites
from slotcar_client.transports.arena import aligned
from slotcar_client.transports.cells import Answer, check_status
from slotcar_client.values import Mapping

# Each site of the model with its index in it.
Sites: TypeAlias = dict[str, tuple[int, model_pb2.Site]]

# Where the outputs of some sites go, if it is not the CPU.
Devices: TypeAlias = dict[str, torch.device]

_MAX_SHAPES = 1024
_MAX_PLACES = 64
_CPU = torch.device("cpu")


class _Part(NamedTuple):
    """One tensor in the block of a call: the site that it is of, and how far from the start of the block it is."""

    site: str
    offset: int
    bytes: int
    size: torch.Size


class MixedDtypes(ShapeMismatch):
    """The inputs have several dtypes; a request has one, so this is as many calls."""


class Shape:
    """`bytes` is how much of the arena a call takes; `fingerprint` stands for the digests that it must use."""

    def __init__(self, call: ForwardCall, mapping: Mapping, sites: Sites) -> None:
        """Raises MixedDtypes, or RequestInvalid, ShapeMismatch or SiteUnknown for tensors that do not fit the sites."""
        check_sites(call)
        self.mapping = mapping
        self.fingerprint = region.fingerprint(mapping.entry_digests)
        self.dtype = next(iter(call.inputs.values())).dtype
        self.bytes = 0
        self._rows = sum(call.row_counts)
        self._row_counts = call.row_counts
        self._xs: list[_Part] = []
        self._bases: list[_Part] = []
        self._outs: list[_Part] = []
        self._items: list[region.Item] = []
        self._payloads: dict[int, bytes] = {}
        for name, travels in shared_inputs(call.inputs.items()):
            self._add(call, name, travels, sites)

    def _add(self, call: ForwardCall, name: str, travels: bool, sites: Sites) -> None:
        if name not in sites:
            raise SiteUnknown(f"the model has no site {name!r}", site=name)
        index, site = sites[name]
        if call.inputs[name].dtype != self.dtype:
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
        part = _Part(name, self.bytes, self._rows * features * self.dtype.itemsize, torch.Size((self._rows, features)))
        self.bytes += aligned(part.bytes)
        return part

    def _check(self, field: str, tensor: torch.Tensor, features: int) -> None:
        found, wanted = list(tensor.shape), [self._rows, features]
        if found != wanted:
            raise ShapeMismatch(f"{field} is {found}, wanted {wanted}", field=field, found=found, wanted=wanted)
        if tensor.dtype != self.dtype:
            raise _wrong_dtype(field, tensor.dtype, str(self.dtype).removeprefix("torch."))
        if tensor.dtype not in DTYPE_NAMES:
            raise _wrong_dtype(field, tensor.dtype, " or ".join(DTYPES))

    def fits(self, call: ForwardCall) -> bool:
        """Whether the tensors have the sizes and the dtype of this shape."""
        dtype, inputs, base = self.dtype, call.inputs, call.base
        for site, _, _, size in self._xs:
            tensor = inputs[site]
            if tensor.dtype is not dtype or tensor.shape != size:
                return False
        if base is None:
            return True
        return base.keys() == inputs.keys() and all(
            base[site].dtype is dtype and base[site].shape == size for site, _, _, size in self._bases
        )

    def payload(self, start: int) -> bytes:
        """The request of a call whose block begins at `start` of the arena."""
        payload = self._payloads.get(start)
        if payload is None:
            payload = self._packed(start)
            while len(self._payloads) >= _MAX_PLACES:
                del self._payloads[next(iter(self._payloads))]
            self._payloads[start] = payload
        return payload

    def _packed(self, start: int) -> bytes:
        items = [
            region.Item(site, x + start, base if base == region.NO_BASE else base + start, out + start)
            for site, x, base, out in self._items
        ]
        dtype = slots.DTYPES.index(DTYPE_NAMES[self.dtype])
        mapping = self.mapping
        return region.Forward(mapping.mapping_id, mapping.generation, dtype, self._row_counts, items).pack()

    def fill(self, call: ForwardCall, address: int) -> None:
        """Copies the tensors into the block at `address`."""
        for site, offset, size, _ in self._xs:
            _copy(address + offset, call.inputs[site], size)
        if call.base is not None:
            for site, offset, size, _ in self._bases:
                _copy(address + offset, call.base[site], size)

    def outputs(self, answer: Answer, address: int, devices: Devices) -> dict[str, torch.Tensor]:
        """{site: output} from the block at `address`, each a tensor of its own. Raises SlotcarError."""
        if answer.status:
            check_status(answer)
        if answer.fingerprint != self.fingerprint:
            raise AuditFailed(
                "the server computed with other digests than the mapping's",
                found=f"{answer.fingerprint:016x}",
                wanted=f"{self.fingerprint:016x}",
            )
        outputs: dict[str, torch.Tensor] = {}
        for site, offset, size, shape in self._outs:
            output = outputs[site] = torch.empty(shape, dtype=self.dtype, device=_CPU)
            ctypes.memmove(output.data_ptr(), address + offset, size)
        for site, device in devices.items():
            outputs[site] = outputs[site].to(device)
        return outputs


class Shapes:
    """The shapes of one session's calls; those of earlier ones are forgotten, the oldest first."""

    def __init__(self, opened: engine_service_pb2.SessionOpened) -> None:
        """Raises ModelUnknown."""
        if not opened.HasField("model_spec"):
            raise ModelUnknown(
                "the server knew no model when the session was opened: open it with a model_spec, or once more now"
            )
        self._epoch = opened.layout.version.epoch
        self._sites: Sites = {site.name: (index, site) for index, site in enumerate(opened.model_spec.sites)}
        self._shapes: dict[object, Shape] = {}

    def of(self, forward: Forward) -> Shape:
        """Raises MappingNotFound for a mapping of another epoch, and as Shape does."""
        call, mapping = forward.call, forward.mapping
        inputs = call.inputs
        # One x object may stand for several sites: which, is part of the shape.
        first: dict[int, str] = {}
        sites = tuple([(site, first.setdefault(id(x), site)) for site, x in inputs.items()])
        key = id(mapping), call.row_counts, call.base is None, sites
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
        return Shape(call, mapping, self._sites)


def devices(call: ForwardCall) -> Devices:
    """Where the inputs are that are not on the CPU."""
    return {site: x.device for site, x in call.inputs.items() if not x.is_cpu}


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


def _copy(address: int, tensor: torch.Tensor, size: int) -> None:
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = tensor.detach().to(_CPU).contiguous()
    ctypes.memmove(address, tensor.data_ptr(), size)


def _wrong_dtype(field: str, found: torch.dtype, wanted: str) -> ShapeMismatch:
    name = str(found).removeprefix("torch.")
    return ShapeMismatch(f"{field} is {name}, wanted {wanted}", field=field, found=name, wanted=wanted)
