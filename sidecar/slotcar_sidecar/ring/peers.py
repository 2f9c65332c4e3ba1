"""Who may have shared memory: the process at the other end of a unix socket, as the kernel says that it is."""

from __future__ import annotations

import os
import socket
import struct

from slotcar_sidecar.core.errors import RequestInvalid

_CREDENTIALS = struct.Struct("@iII")  # process, user, group
_GROUP = struct.Struct("@I")
_SO_PEERGROUPS = 59  # Linux 4.13; not in the socket module
_MOST_BYTES = 1024  # that the socket module reads of an option


def check_peer(connection: socket.socket, group: int | None) -> None:
    """Raises RequestInvalid unless the peer is root, the user of this process, or in `group`, the socket's."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, own_group = _CREDENTIALS.unpack(data)
    if user in (0, os.geteuid()):
        return
    groups = {own_group, *_more_groups(connection)}
    if group not in groups:
        found = f"user {user} of groups {', '.join(map(str, sorted(groups)))}"
        raise RequestInvalid("peer", found=found, wanted=f"root, user {os.geteuid()}, or one of group {group}")


def _more_groups(connection: socket.socket) -> list[int]:
    """None where there are more of them than can be read."""
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
    except OSError:
        return []
    return [group for (group,) in _GROUP.iter_unpack(data)]
