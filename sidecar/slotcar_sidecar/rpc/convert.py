"""Between messages and values; fields that are malformed raise with their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict, TypeVar

from google.protobuf import duration_pb2, timestamp_pb2
from slotcar.v1 import (
    adapter_pb2,
    adapter_service_pb2,
    engine_service_pb2,
    layout_pb2,
    plane_pb2,
    tensor_pb2,
)

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.bindings import OnConflict, Resident
from slotcar_sidecar.core.calls import LoadCall
from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.events import Event
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.holds import Hold, HoldTerms
from slotcar_sidecar.core.ids import AdapterRef, SessionId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.pins import HoldOwner

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
_NANOS = 10**9

T = TypeVar("T")


def known(field: str, number: int, table: dict[int, T]) -> T:
    """What a value of an enum stands for. Raises RequestInvalid for one that the table does not have."""
    try:
        return table[number]
    except KeyError:
        raise RequestInvalid(field, found=number, wanted="a value of its enum") from None


def to_in_slot(field: str, tier: int) -> bool:
    """Whether a slot is wanted; only the two fastest tiers can be asked for."""
    return known(field, tier, _TARGET_TIERS)


class Target(TypedDict):
    """How near bytes are wanted, as fields of a LoadCall or PrefetchCall."""

    in_slot: bool
    on_disk: bool


def to_target(field: str, tier: int) -> Target:
    """How near bytes are wanted."""
    if tier == adapter_pb2.TIER_DISK:
        return {"in_slot": False, "on_disk": True}
    return {"in_slot": to_in_slot(field, tier), "on_disk": False}


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
    return known("on_conflict", number, _ON_CONFLICT)


def to_upload_call(header: adapter_service_pb2.UploadHeader) -> LoadCall:
    """What is to become of an upload, which is not there yet."""
    try:
        return LoadCall(
            AdapterRef.parse(header.ref),
            on_conflict=to_on_conflict(header.on_conflict),
            keep=header.keep,
            **to_target("target_tier", header.target_tier),
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


def from_resident(
    resident: Resident, *, tier: adapter_pb2.Tier.ValueType, sites: bool = False, model: ModelSpec | None = None
) -> adapter_pb2.Adapter:
    """With `sites`, also those with weights, those of the model that need the base's output, and the history.

    `tier` is the fastest that has it.
    """
    adapter = resident.adapter
    return adapter_pb2.Adapter(
        name=str(resident.name),
        digest=str(adapter.digest),
        source=resident.source,
        rank=adapter.rank,
        bytes=adapter.bytes,
        tier=tier,
        slot=resident.slot,
        keep=resident.keep,
        pins=resident.pins,
        sites=(adapter.sites_in(model) if model else adapter.sites) if sites else (),
        sites_needing_base=adapter.sites_needing_base(model) if sites and model else (),
        history=map(str, resident.history) if sites else (),
    )


def from_report(
    adapter: Adapter, model: ModelSpec | None, slot_dtype: str, warnings: tuple[str, ...] = ()
) -> adapter_pb2.LoadReport:
    """`warnings` of the slots, behind the adapter's own."""
    sites = [
        adapter_pb2.SiteReport(name=part.site, rank=part.rank, scale=part.scale, needs_base=part.has_gain)
        for part in adapter.parts
    ]
    return adapter_pb2.LoadReport(
        rank=adapter.rank,
        bytes=adapter.bytes,
        sites_matched=sites,
        sites_zero=adapter.sites_zero(model) if model else (),
        fields_ignored=adapter.fields_ignored,
        file_dtype=adapter.file_dtype,
        slot_dtype=slot_dtype,
        warnings=(*adapter.warnings, *warnings),
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
        engine_service_pb2.ResolvedEntry(digest=entry.digest.value, slot=entry.slot, needs_base=entry.needs_base)
        if entry
        else engine_service_pb2.ResolvedEntry()
        for entry in mapping.entries.table
    ]
    return engine_service_pb2.SetMappingResponse(
        generation=mapping.generation,
        entries=resolved if request.targets else map(resolved.__getitem__, mapping.entries.indices),
        layout=from_version(layout),
    )
