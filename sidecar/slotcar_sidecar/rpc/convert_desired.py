"""From the declared set to messages."""

from __future__ import annotations

from slotcar.v1 import adapter_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from slotcar_sidecar.core.desired import Want, Wanted
from slotcar_sidecar.core.reconcile import EntryStatus, FileStatus
from slotcar_sidecar.rpc.convert import from_seconds


def from_file(file: FileStatus) -> pb.DesiredFile:
    cause = file.cause
    return pb.DesiredFile(
        path=file.path,
        version=file.version,
        prune=file.prune,
        reason=cause.reason if cause else "",
        message=cause.message if cause else "",
    )


def from_entry(entry: EntryStatus) -> pb.DesiredAdapter:
    want, cause = entry.want, entry.cause
    message = pb.DesiredAdapter(
        name=entry.name,
        place=entry.place,
        state=pb.DesiredState.Value(f"DESIRED_STATE_{entry.state.name}"),
        reason=cause.reason if cause else "",
        message=cause.message if cause else "",
        attempts=entry.attempts,
        next_try=None if entry.next_try_seconds is None else from_seconds(entry.next_try_seconds),
        since=from_seconds(entry.since_seconds),
    )
    if want is not None:
        message.desired = pb.Desired.Value(f"DESIRED_{want.state.name}")
        message.source, message.digest = want.source, str(want.digest or "")
        if want.state is not Wanted.ABSENT:
            message.target_tier = _tier(want)
    return message


def _tier(want: Want) -> adapter_pb2.Tier.ValueType:
    if want.in_slot:
        return adapter_pb2.TIER_DEVICE
    return adapter_pb2.TIER_DISK if want.on_disk else adapter_pb2.TIER_HOST
