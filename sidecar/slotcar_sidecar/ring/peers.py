"""Who is at the other end of a unix socket, as the kernel says, and who may have shared memory without a policy."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from slotcar_sidecar.core.access import Identity, Proof
from slotcar_sidecar.core.errors import RequestInvalid

_CREDENTIALS = struct.Struct("@iII")  # process, user, group
_GROUP = struct.Struct("@I")
_SO_PEERGROUPS = 59  # Linux 4.13; not in the socket module
_MOST_BYTES = 1024  # that the socket module reads of an option


@dataclass(frozen=True, slots=True)
class Peer:
    """A process, when it connected: its user and its groups. Its number means nothing in another container."""

    user: int
    groups: frozenset[int]

    @property
    def identities(self) -> frozenset[Identity]:
        """What a policy may know it by."""
        return frozenset({Identity(Proof.UID, str(self.user)), *(Identity(Proof.GID, str(g)) for g in self.groups)})

    def __str__(self) -> str:
        return f"user {self.user} of groups {', '.join(map(str, sorted(self.groups)))}"


def peer_of(connection: socket.socket) -> Peer:
    """Who connected."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, group = _CREDENTIALS.unpack(data)
    return Peer(user, frozenset({group, *_more_groups(connection)}))


def check_peer(peer: Peer, group: int | None) -> None:
    """Raises RequestInvalid unless the peer is root, the user of this process, or in `group`, the socket's."""
    if peer.user not in (0, os.geteuid()) and group not in peer.groups:
        raise RequestInvalid("peer", found=str(peer), wanted=f"root, user {os.geteuid()}, or one of group {group}")


def _more_groups(connection: socket.socket) -> list[int]:
    """None where there are more of them than can be read."""
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
    except OSError:
        return []
    return [group for (group,) in _GROUP.iter_unpack(data)]
