"""The calls that a session makes over gRPC and through a ring alike: from the request to the response."""

from __future__ import annotations

from slotcar.v1 import engine_service_pb2 as pb

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.calls import MappingCall
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.rpc import convert


async def set_mapping(cache: AdapterCache, request: pb.SetMappingRequest) -> pb.SetMappingResponse:
    """Raises SlotcarError."""
    for field in ("entries", "targets", "indices"):
        cache.limits.check_entries(field, len(getattr(request, field)))
    call = MappingCall(
        SessionId(request.session),
        request.mapping_id,
        convert.to_refs(request),
        request.load,
        convert.to_seconds("wait", request, request.wait) or 0.0,
    )
    mapping = await cache.set_mapping(call)
    return convert.from_mapping(mapping, request, cache.layout)


async def release_mapping(cache: AdapterCache, request: pb.ReleaseMappingRequest) -> pb.ReleaseMappingResponse:
    """Raises SlotcarError."""
    cache.release_mapping(SessionId(request.session), request.mapping_id)
    return pb.ReleaseMappingResponse(layout=convert.from_version(cache.layout))


async def fence(cache: AdapterCache, request: pb.FenceRequest) -> pb.FenceResponse:
    """Raises SlotcarError."""
    await cache.fence(SessionId(request.session))
    return pb.FenceResponse(layout=convert.from_version(cache.layout))
