"""What operators and engines ask of the adapter and operator services, as plans that either face performs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message
from slotcar.v1 import adapter_pb2, adapter_service_pb2, operator_service_pb2

from slotcar_client import convert
from slotcar_client.effects import Call, Plan
from slotcar_client.errors import RequestInvalid
from slotcar_client.values import (
    AdapterInfo,
    Capacity,
    DesiredSet,
    Estimate,
    LoadReport,
    Prefetched,
    SessionInfo,
    Settings,
    Snapshot,
    UnloadReport,
)

PAGE_SIZE = 1000
MOST_DEADLINE_SECONDS = 24 * 3600
LOG_LEVELS = ("debug", "info", "warning", "error")
_TIERS = {"device": adapter_pb2.TIER_DEVICE, "host": adapter_pb2.TIER_HOST, "disk": adapter_pb2.TIER_DISK}


def load_request(
    name: str,
    source: str | os.PathLike[str] | None,
    digest: str | None,
    *,
    replace: bool = False,
    keep: bool = False,
    tier: str = "device",
) -> adapter_service_pb2.LoadAdapterRequest:
    """Raises RequestInvalid for an unknown tier."""
    return adapter_service_pb2.LoadAdapterRequest(
        ref=_ref(name, digest),
        source=os.fspath(source) if source is not None else "",
        on_conflict=_on_conflict(replace),
        keep=keep,
        target_tier=_tier(tier),
    )


def upload_header(
    name: str, digest: str | None, *, replace: bool, keep: bool, tier: str
) -> adapter_service_pb2.UploadHeader:
    """Without the sizes. Raises RequestInvalid for an unknown tier."""
    return adapter_service_pb2.UploadHeader(
        ref=_ref(name, digest), on_conflict=_on_conflict(replace), keep=keep, target_tier=_tier(tier)
    )


def load(request: adapter_service_pb2.LoadAdapterRequest) -> Plan[LoadReport]:
    response: adapter_service_pb2.LoadAdapterResponse = yield Call(request)
    return convert.load_report(response)


def unload(ref: str, force: bool) -> Plan[UnloadReport]:
    response: adapter_service_pb2.UnloadAdapterResponse = yield Call(
        adapter_service_pb2.UnloadAdapterRequest(ref=ref, force=force)
    )
    return convert.unload_report(response)


def keep(ref: str) -> Plan[AdapterInfo]:
    response: adapter_service_pb2.KeepAdapterResponse = yield Call(adapter_service_pb2.KeepAdapterRequest(ref=ref))
    return convert.adapter(response.adapter)


def release_keep(ref: str) -> Plan[AdapterInfo]:
    response: adapter_service_pb2.ReleaseKeepResponse = yield Call(adapter_service_pb2.ReleaseKeepRequest(ref=ref))
    return convert.adapter(response.adapter)


def get(ref: str) -> Plan[AdapterInfo]:
    response: adapter_service_pb2.GetAdapterResponse = yield Call(adapter_service_pb2.GetAdapterRequest(ref=ref))
    return convert.adapter(response.adapter)


def snapshot() -> Plan[Snapshot]:
    pages: list[adapter_service_pb2.ListAdaptersResponse] = yield from _pages(adapter_service_pb2.ListAdaptersRequest)
    adapters = tuple(convert.adapter(adapter) for page in pages for adapter in page.adapters)
    return Snapshot(adapters, convert.layout(pages[-1].layout))


def sessions() -> Plan[tuple[SessionInfo, ...]]:
    pages: list[adapter_service_pb2.ListSessionsResponse] = yield from _pages(adapter_service_pb2.ListSessionsRequest)
    return tuple(convert.session(session) for page in pages for session in page.sessions)


def desired() -> Plan[DesiredSet]:
    pages: list[adapter_service_pb2.ListDesiredResponse] = yield from _pages(adapter_service_pb2.ListDesiredRequest)
    last = pages[-1]
    file = convert.desired_file(last.file) if last.HasField("file") else None
    return DesiredSet(file, tuple(convert.desired_adapter(adapter) for page in pages for adapter in page.adapters))


def _pages(request: Callable[..., Message]) -> Plan[list[Any]]:
    """Every page of a list, of which `request` asks for one."""
    pages: list[Any] = []
    token = ""
    while not pages or token:
        pages.append((yield Call(request(page_size=PAGE_SIZE, page_token=token))))
        token = pages[-1].next_page_token
    return pages


def end_session(session: str) -> Plan[bool]:
    response: adapter_service_pb2.EndSessionResponse = yield Call(
        adapter_service_pb2.EndSessionRequest(session=session)
    )
    return response.ended


def estimate(source: str | os.PathLike[str]) -> Plan[Estimate]:
    response: adapter_service_pb2.EstimateAdapterResponse = yield Call(
        adapter_service_pb2.EstimateAdapterRequest(source=os.fspath(source))
    )
    return convert.estimate(response)


def prefetch(refs: Iterable[str], tier: str) -> Plan[tuple[Prefetched, ...]]:
    """Raises RequestInvalid for an unknown tier."""
    request = adapter_service_pb2.PrefetchAdaptersRequest(refs=refs, target_tier=_tier(tier))
    response: adapter_service_pb2.PrefetchAdaptersResponse = yield Call(request)
    return tuple(map(convert.prefetched, response.adapters))


def capacity() -> Plan[Capacity]:
    response: adapter_service_pb2.GetCapacityResponse = yield Call(adapter_service_pb2.GetCapacityRequest())
    return convert.capacity(response)


def shut_down(deadline_seconds: float | None) -> Plan[float]:
    """Raises RequestInvalid for a deadline out of its bounds."""
    deadline = None
    if deadline_seconds is not None:
        if not 0 <= deadline_seconds <= MOST_DEADLINE_SECONDS:
            raise _invalid("deadline", deadline_seconds, f"from 0 to {MOST_DEADLINE_SECONDS} seconds")
        deadline = convert.duration(deadline_seconds)
    response: operator_service_pb2.ShutdownResponse = yield Call(
        operator_service_pb2.ShutdownRequest(deadline=deadline)
    )
    return convert.seconds(response.time_left)


def set_log_level(level: str) -> Plan[str]:
    """Raises RequestInvalid for an unknown level."""
    if level not in LOG_LEVELS:
        raise _invalid("level", level, ", ".join(LOG_LEVELS))
    number = operator_service_pb2.LogLevel.Value(f"LOG_LEVEL_{level.upper()}")
    response: operator_service_pb2.SetLogLevelResponse = yield Call(
        operator_service_pb2.SetLogLevelRequest(level=number)
    )
    return convert.log_level(response.previous)


def settings() -> Plan[Settings]:
    response: operator_service_pb2.GetSettingsResponse = yield Call(operator_service_pb2.GetSettingsRequest())
    return convert.settings(response)


def _ref(name: str, digest: str | None) -> str:
    return f"{name}@{digest}" if digest is not None else name


def _on_conflict(replace: bool) -> adapter_service_pb2.OnConflict.ValueType:
    return adapter_service_pb2.ON_CONFLICT_REPLACE if replace else adapter_service_pb2.ON_CONFLICT_FAIL


def _tier(tier: str) -> adapter_pb2.Tier.ValueType:
    if tier not in _TIERS:
        raise _invalid("tier", tier, "device, host or disk")
    return _TIERS[tier]


def _invalid(field: str, found: object, wanted: str) -> RequestInvalid:
    return RequestInvalid(f"{field} is {found!r}, wanted {wanted}", field=field, found=str(found), wanted=wanted)
