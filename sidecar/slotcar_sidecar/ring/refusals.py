"""Refusals as the bytes of an Error message that fits where it goes."""

from __future__ import annotations

from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.rpc.status import to_message

_ROOM = 64  # for the code, the reason and the lengths of fields


def to_payload(error: SlotcarError, most_bytes: int) -> bytes:
    """The Error message; without its facts, or with a shorter sentence, where it would be longer than `most_bytes`."""
    message = to_message(error)
    if message.ByteSize() > most_bytes:
        message.metadata.clear()
    if message.ByteSize() > most_bytes:
        message.message = message.message.encode()[: max(most_bytes - _ROOM, 0)].decode(errors="ignore")
    return message.SerializeToString()
