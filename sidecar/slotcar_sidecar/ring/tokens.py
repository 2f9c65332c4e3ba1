"""Tokens for clients of the gRPC socket: each lives as long as the hand-shake connection that it was given over.

So it needs no clock and no renewal, dies with its process, and is of no use to who copies it for longer than that.
Invariant: a token is known to `access` as long as its connection is open, and no longer.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from slotcar.v1 import plane_pb2

from slotcar_sidecar.ring.peers import Peer
from slotcar_sidecar.rpc.access import Access, Token


class Tokens:
    """The connections that tokens live with, on the event loop that it is made on."""

    def __init__(self, access: Access | None) -> None:
        self._access = access
        self._loop = asyncio.get_running_loop()
        self._given: dict[socket.socket, Token] = {}

    def give(self, connection: socket.socket, peer: Peer) -> bool:
        """Answers a hello that asks for one; True if the connection is the token's now. Raises SlotcarError."""
        if self._access is None:
            _send(connection, "")
            return False
        text, token = self._access.issue(peer.identities, str(peer), partial(self._end, connection))
        self._given[connection] = token
        self._loop.add_reader(connection, self._end, connection)  # whatever it says, it may say no more
        if not _send(connection, text):
            self._end(connection)
        return True

    def close(self) -> None:
        """Ends them all."""
        for connection in tuple(self._given):
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """Idempotent."""
        token = self._given.pop(connection, None)
        if token is not None and self._access is not None:
            self._access.forget(token)
            self._loop.remove_reader(connection)
            connection.close()


def _send(connection: socket.socket, text: str) -> bool:
    """Whether the token is on its way."""
    welcome = plane_pb2.PlaneWelcome(token=plane_pb2.TokenIssued(token=text))
    try:
        connection.send(welcome.SerializeToString())
    except OSError:
        return False
    return True
