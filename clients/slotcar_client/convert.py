"""From messages of the API to the client's values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from google.protobuf import duration_pb2
from slotcar.v1 import (
    adapter_pb2,
    adapter_service_pb2,
    engine_service_pb2,
    layout_pb2,
    operator_service_pb2,
    plane_pb2,
    tensor_pb2,
)

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


def duration(seconds: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(seconds), nanos=int((seconds - int(seconds)) * 1e9))


def seconds(message: duration_pb2.Duration) -> float:
    return message.seconds + message.nanos / 1e9


def tier(value: int) -> str:
    return _word(adapter_pb2.Tier.Name, "TIER_", value)


def plane(value: int) -> str:
    return _word(plane_pb2.Plane.Name, "PLANE_", value)


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
        max_response_bytes=message.max_response_bytes,
        planes=tuple(map(plane, message.planes)),
    )


def adapter(message: adapter_pb2.Adapter) -> values.AdapterInfo:
    return values.AdapterInfo(
        name=message.name,
        digest=message.digest,
        source=message.source,
        rank=message.rank,
        bytes=message.bytes,
        tier=tier(message.tier),
        slot=message.slot if message.HasField("slot") else None,
        keep=message.keep,
        pins=message.pins,
        sites=tuple(message.sites),
        history=tuple(message.history),
    )


def _report(message: adapter_pb2.LoadReport) -> dict[str, Any]:
    """The fields of a values.Report."""
    return {
        "rank": message.rank,
        "bytes": message.bytes,
        "sites": tuple(values.SiteReport(site.name, site.rank, site.scale) for site in message.sites_matched),
        "sites_zero": tuple(message.sites_zero),
        "fields_ignored": tuple(message.fields_ignored),
        "warnings": tuple(message.warnings),
        "file_dtype": message.file_dtype,
        "slot_dtype": message.slot_dtype,
    }


def load_report(
    message: adapter_service_pb2.LoadAdapterResponse | adapter_service_pb2.LoadAdapterStreamResponse,
) -> values.LoadReport:
    return values.LoadReport(
        **_report(message.report),
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
    return values.Estimate(
        **_report(message.report),
        digest=message.digest,
        fits=message.fits,
        why_not=message.why_not,
        device_bytes=message.device_bytes,
    )


def prefetched(message: adapter_service_pb2.PrefetchedAdapter) -> values.Prefetched:
    found = adapter(message.adapter) if message.HasField("adapter") else None
    return values.Prefetched(message.ref, found, message.why_not)


def desired_file(message: adapter_service_pb2.DesiredFile) -> values.DesiredFile:
    return values.DesiredFile(message.path, message.version, message.prune, message.reason, message.message)


def desired_adapter(message: adapter_service_pb2.DesiredAdapter) -> values.DesiredAdapter:
    desired, state = adapter_service_pb2.Desired.Name, adapter_service_pb2.DesiredState.Name
    return values.DesiredAdapter(
        name=message.name,
        place=message.place,
        desired=_word(desired, "DESIRED_", message.desired) if message.desired else "",
        source=message.source,
        digest=message.digest,
        tier=tier(message.target_tier) if message.target_tier else "",
        state=_word(state, "DESIRED_STATE_", message.state),
        reason=message.reason,
        message=message.message,
        attempts=message.attempts,
        next_try_seconds=seconds(message.next_try) if message.HasField("next_try") else None,
        since_seconds=seconds(message.since),
    )


def capacity(message: adapter_service_pb2.GetCapacityResponse) -> values.Capacity:
    counts = {
        field.name: getattr(message, field.name)
        for field in fields(values.Capacity)
        if field.name not in ("version", "restore_failures")
    }
    failures = tuple(values.RestoreFailure(each.ref, each.why_not) for each in message.restore_failures)
    return values.Capacity(version=version(message.layout), restore_failures=failures, **counts)


def session(message: adapter_service_pb2.SessionStatus) -> values.SessionInfo:
    return values.SessionInfo(
        session=message.session,
        client_name=message.client_name,
        attached=message.attached,
        grace_left_seconds=seconds(message.grace_left) if message.HasField("grace_left") else None,
        ranks=message.ranks,
        joined=tuple(message.joined),
        reserved_slots=message.reserved_slots,
        mappings=tuple(_mapping(mapping) for mapping in message.mappings),
        holds=tuple(_hold(hold) for hold in message.holds),
        forwards_in_flight=message.forwards_in_flight,
        planes=tuple(map(plane, message.planes)),
    )


def _mapping(message: adapter_service_pb2.MappingStatus) -> values.MappingInfo:
    return values.MappingInfo(
        mapping_id=message.mapping_id,
        generation=message.generation,
        refs=tuple(message.refs),
        slots=tuple(message.slots),
        pinned=message.pinned,
        current=message.current,
        idle_seconds=seconds(message.idle),
    )


def _hold(message: adapter_service_pb2.HoldStatus) -> values.HoldInfo:
    left = seconds(message.left) if message.HasField("left") else None
    return values.HoldInfo(message.hold_id, message.ref, tier(message.tier), left)


def log_level(value: int) -> str:
    return _word(operator_service_pb2.LogLevel.Name, "LOG_LEVEL_", value)


def settings(message: operator_service_pb2.GetSettingsResponse) -> values.Settings:
    return values.Settings(
        server_version=message.version,
        state=_word(operator_service_pb2.ServerState.Name, "SERVER_STATE_", message.state),
        log_level=log_level(message.log_level),
        pid=message.pid,
        started_seconds=message.started.seconds + message.started.nanos / 1e9,
        working_directory=message.working_directory,
        addresses=tuple(message.addresses),
        metrics_url=message.metrics_url,
        settings=dict(message.settings),
        version=version(message.layout),
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
