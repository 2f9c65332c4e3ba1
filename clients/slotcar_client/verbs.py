"""What operators and engines ask of the adapter service, as plans that either face performs."""

from __future__ import annotations

import os
from collections.abc import Iterable

from slotcar.v1 import adapter_pb2, adapter_service_pb2

from slotcar_client import convert
from slotcar_client.effects import Call, Plan
from slotcar_client.errors import RequestInvalid
from slotcar_client.values import (
    AdapterInfo,
    Capacity,
    DesiredAdapter,
    DesiredSet,
    Estimate,
    LoadReport,
    Prefetched,
    SessionInfo,
    Snapshot,
    UnloadReport,
)

PAGE_SIZE = 1000
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
    adapters: list[AdapterInfo] = []
    token = ""
    while True:
        page: adapter_service_pb2.ListAdaptersResponse = yield Call(
            adapter_service_pb2.ListAdaptersRequest(page_size=PAGE_SIZE, page_token=token)
        )
        adapters.extend(convert.adapter(adapter) for adapter in page.adapters)
        token = page.next_page_token
        if not token:
            return Snapshot(tuple(adapters), convert.layout(page.layout))


def sessions() -> Plan[tuple[SessionInfo, ...]]:
    found: list[SessionInfo] = []
    token = ""
    while True:
        page: adapter_service_pb2.ListSessionsResponse = yield Call(
            adapter_service_pb2.ListSessionsRequest(page_size=PAGE_SIZE, page_token=token)
        )
        found.extend(convert.session(session) for session in page.sessions)
        token = page.next_page_token
        if not token:
            return tuple(found)


def desired() -> Plan[DesiredSet]:
    found: list[DesiredAdapter] = []
    token = ""
    while True:
        page: adapter_service_pb2.ListDesiredResponse = yield Call(
            adapter_service_pb2.ListDesiredRequest(page_size=PAGE_SIZE, page_token=token)
        )
        found.extend(map(convert.desired_adapter, page.adapters))
        token = page.next_page_token
        if not token:
            file = convert.desired_file(page.file) if page.HasField("file") else None
            return DesiredSet(file, tuple(found))


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


def _ref(name: str, digest: str | None) -> str:
    return f"{name}@{digest}" if digest is not None else name


def _on_conflict(replace: bool) -> adapter_service_pb2.OnConflict.ValueType:
    return adapter_service_pb2.ON_CONFLICT_REPLACE if replace else adapter_service_pb2.ON_CONFLICT_FAIL


def _tier(tier: str) -> adapter_pb2.Tier.ValueType:
    if tier not in _TIERS:
        raise RequestInvalid(
            f"tier is {tier!r}, wanted device, host or disk", field="tier", found=tier, wanted="device, host or disk"
        )
    return _TIERS[tier]
