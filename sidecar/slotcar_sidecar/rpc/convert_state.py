"""From the server's own state to messages: how full it is, and what each session has."""

from __future__ import annotations

from slotcar.v1 import adapter_service_pb2 as pb

from slotcar_sidecar.core.calls import Capacity
from slotcar_sidecar.core.holds import Hold
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.pins import MappingOwner
from slotcar_sidecar.core.residency import Residency
from slotcar_sidecar.core.session import Session
from slotcar_sidecar.rpc.convert import PLANES, from_hold_tier, from_seconds, from_version

_MAX_FAILURES = 100


def from_capacity(capacity: Capacity, layout: Layout) -> pb.GetCapacityResponse:
    slots = capacity.slots
    return pb.GetCapacityResponse(
        layout=from_version(layout),
        slots=len(layout.slots),
        slots_free=slots[SlotState.FREE],
        slots_filling=slots[SlotState.FILLING],
        slots_occupied=slots[SlotState.OCCUPIED],
        slots_draining=slots[SlotState.DRAINING],
        slots_pinned=capacity.pinned,
        slots_available=capacity.available,
        slots_reserved=capacity.reserved,
        keeps=capacity.keeps,
        slot_bytes=capacity.slot_bytes,
        host_bytes_used=capacity.host.used_bytes,
        host_bytes_capacity=capacity.host.capacity_bytes,
        host_bytes_held=capacity.host.held_bytes,
        adapters=capacity.adapters[0],
        adapters_capacity=capacity.adapters[1],
        sessions=capacity.sessions[0],
        sessions_capacity=capacity.sessions[1],
        waiting=capacity.waiting,
        disk_bytes_used=capacity.disk.used_bytes,
        disk_bytes_capacity=capacity.disk.capacity_bytes,
        disk_bytes_held=capacity.disk.held_bytes,
        restoring=capacity.restoring,
        restore_failures=[
            pb.RestoreFailure(ref=str(ref), why_not=why)
            for ref, why in sorted(capacity.restore_failures.items(), key=lambda each: str(each[0]))[:_MAX_FAILURES]
        ],
    )


def from_session(session: Session, residency: Residency, running: int, now: float) -> pb.SessionStatus:
    """`running`: how many of its Forwards are under way."""
    grace_left = None if session.expires_at is None else from_seconds(session.expires_at - now)
    mappings = sorted(session.mappings.values(), key=lambda mapping: mapping.mapping_id)
    return pb.SessionStatus(
        session=session.session_id.short,
        client_name=session.terms.client_name,
        attached=session.attachment is not None,
        grace_left=grace_left,
        ranks=session.terms.ranks,
        joined=sorted(session.joined),
        reserved_slots=session.terms.reserved_slots,
        mappings=[_from_mapping(mapping, session, residency, now) for mapping in mappings],
        holds=[_from_hold(hold, now) for hold in residency.holds.of_session(session.session_id)],
        forwards_in_flight=running,
        planes=sorted({PLANES[plane] for plane in tuple(session.planes.values())}),
    )


def _from_mapping(mapping: Mapping, session: Session, residency: Residency, now: float) -> pb.MappingStatus:
    owner = MappingOwner(session.session_id, mapping.mapping_id)
    return pb.MappingStatus(
        mapping_id=mapping.mapping_id,
        generation=mapping.generation,
        refs=list(dict.fromkeys(str(ref) for ref in mapping.refs if ref is not None)),
        slots=sorted(mapping.slots),
        pinned=not mapping.slots or bool(residency.pins.by(owner)),
        current=residency.layout.is_current(mapping.slots, mapping.generation),
        idle=from_seconds(now - session.last_used.get(mapping.mapping_id, now)),
    )


def _from_hold(hold: Hold, now: float) -> pb.HoldStatus:
    left = None if hold.expires_at is None else from_seconds(hold.expires_at - now)
    return pb.HoldStatus(hold_id=hold.owner.hold_id, ref=str(hold.ref), tier=from_hold_tier(hold), left=left)
