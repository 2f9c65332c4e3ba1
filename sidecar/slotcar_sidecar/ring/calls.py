"""The calls of a ring that the owner answers: each is the RPC of its name, for the channel's session alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from slotcar.shm.region import Kind, Status
from slotcar.v1 import engine_service_pb2 as pb

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.errors import CapacityExceeded, RequestInvalid
from slotcar_sidecar.ring.channel import Channel
from slotcar_sidecar.ring.refusals import to_payload
from slotcar_sidecar.ring.thread import Asked
from slotcar_sidecar.rpc import session_calls
from slotcar_sidecar.rpc.access import Access
from slotcar_sidecar.rpc.interceptors import Count, counted

_ENTRY_BYTES = 80  # the most that an entry takes in the answer to SetMapping
_REST_BYTES = 256  # and the rest of it


@dataclass(frozen=True, slots=True)
class _Call:
    """One RPC: its name, its request, and what answers it."""

    name: str
    request: Any
    answer: Callable[[AdapterCache, Any], Awaitable[Any]]


_CALLS: Mapping[int, _Call] = {
    Kind.SET_MAPPING: _Call("SetMapping", pb.SetMappingRequest, session_calls.set_mapping),
    Kind.RELEASE_MAPPING: _Call("ReleaseMapping", pb.ReleaseMappingRequest, session_calls.release_mapping),
    Kind.FENCE: _Call("Fence", pb.FenceRequest, session_calls.fence),
}


class Calls:
    """Answers them; `count` is told how each ends, and `access`, if there is a policy, whether each may be made."""

    def __init__(self, cache: AdapterCache, count: Count, access: Access | None = None) -> None:
        self._cache = cache
        self._count = count
        self._access = access

    async def answer(self, channel: Channel, asked: Asked) -> tuple[Status, bytes]:
        """The response, or the Error; as bytes that fit into the cell."""
        call, room = _CALLS[asked.kind], channel.geometry.payload_bytes
        try:
            if self._access is not None:
                self._access.admit_owner(channel.terms.session, call.name)
            request = _read(call, asked.payload)
            _check_session(request, str(channel.terms.session.session_id))
            if call.name == "SetMapping":
                _check_room(request, room)
            if self._access is not None:
                self._access.check(request, call.name, channel.terms.plane)
            response = (await call.answer(self._cache, request)).SerializeToString()
        except Exception as error:
            return Status.ERROR, to_payload(counted(self._count, call.name, error), room)
        self._count(call.name, "OK")
        return Status.OK, response


def _read(call: _Call, payload: bytes) -> Any:
    try:
        return call.request.FromString(payload)
    except DecodeError:
        raise RequestInvalid("request", found=f"{len(payload)} bytes that are no message", wanted="a message") from None


def _check_session(request: Any, session: str) -> None:
    """An empty session is the connection's; no other may be asked for."""
    request.session = request.session or session
    if request.session != session:
        raise RequestInvalid("session", found="another session", wanted="the connection's, or none")


def _check_room(request: pb.SetMappingRequest, room: int) -> None:
    """Before anything is done: an answer that does not fit would leave a mapping that nobody knows of."""
    count = len(request.targets) or len(request.entries)
    if count * _ENTRY_BYTES + _REST_BYTES > room:
        raise CapacityExceeded(
            f"the answer for {count} entries may not fit into {room} bytes: say them by targets, or over gRPC",
            found=count,
            wanted=(room - _REST_BYTES) // _ENTRY_BYTES,
        )
