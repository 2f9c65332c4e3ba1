"""From messages of the API to the client's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slotcar.v1 import adapter_pb2, adapter_service_pb2, engine_service_pb2, layout_pb2, tensor_pb2

from slotcar_client import values

DTYPE_NAMES = {
    tensor_pb2.DTYPE_FLOAT32: "float32",
    tensor_pb2.DTYPE_FLOAT16: "float16",
    tensor_pb2.DTYPE_BFLOAT16: "bfloat16",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def _word(name: Callable[[Any], str], prefix: str, value: int) -> str:
    """An enum value as a word, such as "occupied"; one of a newer server as its number."""
    try:
        return name(value).removeprefix(prefix).lower()
    except ValueError:
        return str(value)


def version(message: layout_pb2.LayoutVersion) -> values.LayoutVersion:
    return values.LayoutVersion(message.epoch, message.generation)


def slot_state(value: int) -> str:
    return _word(layout_pb2.SlotState.Name, "SLOT_STATE_", value)


def layout(message: layout_pb2.Layout) -> values.Layout:
    slots = (values.Slot(s.index, slot_state(s.state), s.digest, s.mod_generation) for s in message.slots)
    return values.Layout(version(message.version), tuple(slots))


def server_info(message: engine_service_pb2.ServerInfo) -> values.ServerInfo:
    return values.ServerInfo(
        version=message.version,
        slots=message.slots,
        max_rank=message.max_rank,
        slot_dtype=DTYPE_NAMES.get(message.slot_dtype, str(message.slot_dtype)),
        max_message_bytes=message.max_message_bytes,
    )


def adapter(message: adapter_pb2.Adapter) -> values.AdapterInfo:
    return values.AdapterInfo(
        name=message.name,
        digest=message.digest,
        source=message.source,
        rank=message.rank,
        bytes=message.bytes,
        tier=_word(adapter_pb2.Tier.Name, "TIER_", message.tier),
        slot=message.slot if message.HasField("slot") else None,
        keep=message.keep,
        pins=message.pins,
        sites=tuple(message.sites),
    )


def _sites(report: adapter_pb2.LoadReport) -> tuple[values.SiteReport, ...]:
    return tuple(values.SiteReport(site.name, site.rank, site.scale) for site in report.sites_matched)


def load_report(message: adapter_service_pb2.LoadAdapterResponse) -> values.LoadReport:
    report = message.report
    return values.LoadReport(
        rank=report.rank,
        bytes=report.bytes,
        sites=_sites(report),
        sites_zero=tuple(report.sites_zero),
        fields_ignored=tuple(report.fields_ignored),
        warnings=tuple(report.warnings),
        file_dtype=report.file_dtype,
        slot_dtype=report.slot_dtype,
        name=message.adapter.name,
        digest=message.adapter.digest,
        adapter=adapter(message.adapter),
        already_resident=message.already_resident,
        version=version(message.layout),
    )


def unload_report(message: adapter_service_pb2.UnloadAdapterResponse) -> values.UnloadReport:
    return values.UnloadReport(
        digest=message.digest,
        slot_state=slot_state(message.slot_state) if message.slot_state else None,
        pins_ended=message.pins_ended,
        version=version(message.layout),
    )


def estimate(message: adapter_service_pb2.EstimateAdapterResponse) -> values.Estimate:
    report = message.report
    return values.Estimate(
        rank=report.rank,
        bytes=report.bytes,
        sites=_sites(report),
        sites_zero=tuple(report.sites_zero),
        fields_ignored=tuple(report.fields_ignored),
        warnings=tuple(report.warnings),
        file_dtype=report.file_dtype,
        slot_dtype=report.slot_dtype,
        digest=message.digest,
        fits=message.fits,
        why_not=message.why_not,
        device_bytes=message.device_bytes,
    )


def event(message: adapter_service_pb2.WatchEventsResponse, missed: int) -> values.Event:
    happened = message.event
    return values.Event(
        kind=_word(adapter_service_pb2.EventKind.Name, "EVENT_KIND_", happened.kind),
        time_seconds=happened.time.seconds + happened.time.nanos / 1e9,
        generation=happened.generation,
        name=happened.name,
        digest=happened.digest,
        slot=happened.slot if happened.HasField("slot") else None,
        session=happened.session,
        reason=happened.reason,
        missed=missed,
    )
