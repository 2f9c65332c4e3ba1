"""Between messages and values; fields that are malformed raise with their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from google.protobuf import duration_pb2, timestamp_pb2
from slotcar.v1 import (
    adapter_pb2,
    adapter_service_pb2,
    engine_service_pb2,
    layout_pb2,
    model_pb2,
    plane_pb2,
    tensor_pb2,
)

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.events import Event
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.holds import Hold, HoldTerms
from slotcar_sidecar.core.ids import AdapterRef, SessionId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.pins import HoldOwner
from slotcar_sidecar.core.residency import OnConflict, Resident
from slotcar_sidecar.core.tensor import Matrix

DTYPES: dict[str, tensor_pb2.Dtype.ValueType] = {
    "float32": tensor_pb2.DTYPE_FLOAT32,
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
}
PLANES: dict[str, plane_pb2.Plane.ValueType] = {
    "stream": plane_pb2.PLANE_STREAM,
    "ring": plane_pb2.PLANE_RING,
    "direct": plane_pb2.PLANE_DIRECT,
}
_DTYPE_NAMES: dict[int, str] = {number: name for name, number in DTYPES.items()}
_SLOT_STATES: dict[SlotState, layout_pb2.SlotState.ValueType] = {
    SlotState.FREE: layout_pb2.SLOT_STATE_FREE,
    SlotState.FILLING: layout_pb2.SLOT_STATE_FILLING,
    SlotState.OCCUPIED: layout_pb2.SLOT_STATE_OCCUPIED,
    SlotState.DRAINING: layout_pb2.SLOT_STATE_DRAINING,
}
_ON_CONFLICT: dict[int, OnConflict] = {
    adapter_service_pb2.ON_CONFLICT_UNSPECIFIED: OnConflict.FAIL,
    adapter_service_pb2.ON_CONFLICT_FAIL: OnConflict.FAIL,
    adapter_service_pb2.ON_CONFLICT_REPLACE: OnConflict.REPLACE,
}
_TARGET_TIERS: dict[int, bool] = {
    adapter_pb2.TIER_UNSPECIFIED: True,
    adapter_pb2.TIER_HOST: False,
    adapter_pb2.TIER_DEVICE: True,
}
_SITE_KINDS: dict[int, str] = {
    model_pb2.SITE_KIND_UNSPECIFIED: "linear",
    model_pb2.SITE_KIND_LINEAR: "linear",
}

_MAX_SITES = 1 << 14
_NANOS = 10**9

T = TypeVar("T")


def _known(field: str, number: int, table: dict[int, T]) -> T:
    try:
        return table[number]
    except KeyError:
        raise RequestInvalid(field, found=number, wanted="a value of its enum") from None


def to_in_slot(field: str, tier: int) -> bool:
    """Whether a slot is wanted; only the two fastest tiers can be asked for."""
    return _known(field, tier, _TARGET_TIERS)


def to_seconds(field: str, message: object, duration: duration_pb2.Duration) -> float | None:
    """The seconds of a field of `message`, None when it is absent. Its bounds are the core's matter."""
    if not message.HasField(field):  # type: ignore[attr-defined]
        return None
    seconds, nanos = duration.seconds, duration.nanos
    if abs(nanos) >= _NANOS or seconds * nanos < 0:
        wanted = f"less than {_NANOS} nanos, of the sign of the seconds"
        raise RequestInvalid(field, found=f"{seconds} seconds and {nanos} nanos", wanted=wanted)
    return seconds + nanos / _NANOS


def to_hold(
    request: engine_service_pb2.HoldAdapterRequest | adapter_service_pb2.LoadHold, prefix: str = ""
) -> HoldTerms:
    """The terms of a hold; without a tier, the bytes alone."""
    slot = request.tier != adapter_pb2.TIER_UNSPECIFIED and to_in_slot(f"{prefix}tier", request.tier)
    try:
        seconds = to_seconds("duration", request, request.duration)
        return HoldTerms(HoldOwner(SessionId(request.session), request.hold_id), seconds, slot)
    except RequestInvalid as error:
        raise error.at(prefix + (error.field or "")) from None


def from_hold_tier(hold: Hold) -> adapter_pb2.Tier.ValueType:
    return adapter_pb2.TIER_DEVICE if hold.slot else adapter_pb2.TIER_HOST


def from_seconds(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(max(0.0, seconds) * 1e9))
    return duration


def to_on_conflict(number: int) -> OnConflict:
    return _known("on_conflict", number, _ON_CONFLICT)


def to_upload_call(header: adapter_service_pb2.UploadHeader) -> LoadCall:
    """What is to become of an upload, which is not there yet."""
    try:
        return LoadCall(
            AdapterRef.parse(header.ref),
            on_conflict=to_on_conflict(header.on_conflict),
            keep=header.keep,
            in_slot=to_in_slot("target_tier", header.target_tier),
        )
    except RequestInvalid as error:
        raise error.at(f"header.{error.field}") from None


def from_version(layout: Layout) -> layout_pb2.LayoutVersion:
    return layout_pb2.LayoutVersion(epoch=str(layout.epoch), generation=layout.generation)


def from_slot_state(state: SlotState | None) -> layout_pb2.SlotState.ValueType:
    return layout_pb2.SLOT_STATE_UNSPECIFIED if state is None else _SLOT_STATES[state]


def from_layout(layout: Layout) -> layout_pb2.Layout:
    slots = [
        layout_pb2.Slot(
            index=index,
            state=from_slot_state(slot.state),
            digest=str(slot.digest or ""),
            mod_generation=slot.mod_generation,
        )
        for index, slot in enumerate(layout.slots)
    ]
    return layout_pb2.Layout(version=from_version(layout), slots=slots)


def from_model(model: ModelSpec) -> model_pb2.ModelSpec:
    sites = [
        model_pb2.Site(
            name=site.name,
            in_features=site.in_features,
            out_features=site.out_features,
            kind=model_pb2.SITE_KIND_LINEAR,
        )
        for site in model.sites
    ]
    return model_pb2.ModelSpec(
        sites=sites,
        dtype=DTYPES[model.dtype] if model.dtype else tensor_pb2.DTYPE_UNSPECIFIED,
        tensor_parallel=model.tensor_parallel,
        fingerprint=model.fingerprint or "",
    )


def to_model(spec: model_pb2.ModelSpec) -> ModelSpec:
    if len(spec.sites) > _MAX_SITES:
        raise RequestInvalid("model_spec.sites", found=f"{len(spec.sites)} sites", wanted=f"at most {_MAX_SITES}")
    dtype = _DTYPE_NAMES.get(spec.dtype)
    if dtype is None and spec.dtype != tensor_pb2.DTYPE_UNSPECIFIED:
        raise RequestInvalid("model_spec.dtype", found=spec.dtype, wanted="a value of its enum")
    sites = []
    for index, site in enumerate(spec.sites):
        field = f"model_spec.sites[{index}]"
        kind = _known(f"{field}.kind", site.kind, _SITE_KINDS)
        sites.append(Site.checked(field, (site.name, site.in_features, site.out_features, kind)))
    return ModelSpec.of(
        sites, dtype=dtype, tensor_parallel=spec.tensor_parallel or 1, fingerprint=spec.fingerprint or None
    )


def from_resident(resident: Resident, *, in_host: bool, sites: bool = False) -> adapter_pb2.Adapter:
    adapter = resident.adapter
    tier = adapter_pb2.TIER_HOST if in_host else adapter_pb2.TIER_SOURCE
    return adapter_pb2.Adapter(
        name=str(resident.name),
        digest=str(adapter.digest),
        source=resident.source,
        rank=adapter.rank,
        bytes=adapter.bytes,
        tier=tier if resident.slot is None else adapter_pb2.TIER_DEVICE,
        slot=resident.slot,
        keep=resident.keep,
        pins=resident.pins,
        sites=adapter.sites if sites else (),
    )


def from_report(adapter: Adapter, model: ModelSpec | None, slot_dtype: str) -> adapter_pb2.LoadReport:
    sites = [adapter_pb2.SiteReport(name=part.site, rank=part.rank, scale=part.scale) for part in adapter.parts]
    return adapter_pb2.LoadReport(
        rank=adapter.rank,
        bytes=adapter.bytes,
        sites_matched=sites,
        sites_zero=adapter.sites_zero(model) if model else (),
        fields_ignored=adapter.fields_ignored,
        file_dtype=adapter.file_dtype,
        slot_dtype=slot_dtype,
        warnings=adapter.warnings,
    )


def from_event(event: Event) -> adapter_service_pb2.Event:
    time = timestamp_pb2.Timestamp()
    time.FromNanoseconds(int(event.time * 1e9))
    return adapter_service_pb2.Event(
        kind=adapter_service_pb2.EventKind.Value(f"EVENT_KIND_{event.kind.name}"),
        time=time,
        generation=event.generation,
        name=str(event.name or ""),
        digest=str(event.digest or ""),
        slot=event.slot,
        session=event.session.short if event.session else "",
        reason=event.reason,
    )


def to_refs(request: engine_service_pb2.SetMappingRequest) -> Folded[AdapterRef | None]:
    """The ref of each entry, None for the base model. Raises RequestInvalid."""
    if not request.indices and not request.targets:
        return _folded("entries", request.entries)
    if request.entries:
        raise RequestInvalid("entries", found=f"{len(request.entries)} beside targets", wanted="one of the two")
    targets, used = _folded("targets", request.targets), set(request.indices)
    if len(targets.table) != len(targets):
        raise RequestInvalid("targets", found=f"{len(targets)}, some alike", wanted="each once")
    if used != set(range(len(targets))):
        found = f"{len(used)} numbers up to {max(used, default=0)}"
        raise RequestInvalid("indices", found=found, wanted=f"each number below {len(targets)}, the targets")
    return Folded(targets.table, request.indices)


def _folded(field: str, entries: Iterable[engine_service_pb2.MappingEntry]) -> Folded[AdapterRef | None]:
    places: dict[str, int] = {}
    table: list[AdapterRef | None] = []
    indices: list[int] = []
    for index, entry in enumerate(entries):
        text = entry.ref
        place = places.get(text)
        if place is None or not text:  # the empty text is the base model, if nothing is wrong with it
            ref = _to_ref(f"{field}[{index}]", entry)
        if place is None:
            place = places[text] = len(table)
            table.append(ref)
        indices.append(place)
    return Folded(table, indices)


def _to_ref(field: str, entry: engine_service_pb2.MappingEntry) -> AdapterRef | None:
    target = entry.WhichOneof("target")
    if target is None or (target == "base" and not entry.base):
        raise RequestInvalid(field, found="neither", wanted="ref, or base = true")
    return AdapterRef.parse(entry.ref, f"{field}.ref") if target == "ref" else None


def from_mapping(
    mapping: Mapping, request: engine_service_pb2.SetMappingRequest, layout: Layout
) -> engine_service_pb2.SetMappingResponse:
    """The answer to SetMapping: what each entry resolved to, or each target of a request that has some."""
    resolved = [
        engine_service_pb2.ResolvedEntry(digest=entry.digest.value, slot=entry.slot)
        if entry
        else engine_service_pb2.ResolvedEntry()
        for entry in mapping.entries.table
    ]
    return engine_service_pb2.SetMappingResponse(
        generation=mapping.generation,
        entries=resolved if request.targets else map(resolved.__getitem__, mapping.entries.indices),
        layout=from_version(layout),
    )


def to_matrix(field: str, tensor: tensor_pb2.TensorRef) -> Matrix:
    if tensor.WhichOneof("storage") is None:
        raise RequestInvalid(f"{field}.storage", found="nothing", wanted="inline")
    data = tensor.inline
    dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype or "unspecified"))
    return Matrix.checked(field, dtype, tensor.rows, tensor.columns, tensor.row_stride, data)


def to_items(items: list[engine_service_pb2.ForwardItem]) -> list[ForwardItem]:
    """The items of a Forward; one without x shares the Matrix of the item before."""
    converted: list[ForwardItem] = []
    for index, item in enumerate(items):
        field = f"items[{index}]"
        if item.HasField("x"):
            x = to_matrix(f"{field}.x", item.x)
        elif converted:
            x = converted[-1].x
        else:
            raise RequestInvalid(f"{field}.x", found="nothing", wanted="a tensor")
        adds = item.mode == engine_service_pb2.FORWARD_MODE_ADD
        if not adds and item.mode not in (
            engine_service_pb2.FORWARD_MODE_UNSPECIFIED,
            engine_service_pb2.FORWARD_MODE_DELTA,
        ):
            raise RequestInvalid(f"{field}.mode", found=item.mode, wanted="a value of its enum")
        if item.HasField("base") != adds:
            raise RequestInvalid(
                f"{field}.base", found="present" if not adds else "nothing", wanted="it in mode ADD only"
            )
        converted.append(ForwardItem(item.site, x, to_matrix(f"{field}.base", item.base) if adds else None))
    return converted


def from_matrix(matrix: Matrix) -> tensor_pb2.TensorRef:
    """The matrix as a message; its rows must be contiguous."""
    assert matrix.row_stride == matrix.columns
    return tensor_pb2.TensorRef(
        dtype=DTYPES[matrix.dtype], rows=matrix.rows, columns=matrix.columns, inline=bytes(matrix.data)
    )
