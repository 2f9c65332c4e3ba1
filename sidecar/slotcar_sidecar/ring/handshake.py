"""The hand-shake: a client names its session and gets the descriptors of a channel, or gets the token it asks for.

Invariant: a client that says nothing, or anything but one sound hello, has a connection for a few seconds at most, and
keeps nobody else from getting one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError
from slotcar.shm import region
from slotcar.shm.handshake import MESSAGE_BYTES
from slotcar.v1 import plane_pb2
from slotcar.version import compatible

from slotcar_sidecar.core.errors import RequestInvalid, VersionMismatch
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.ring.peers import Peer, check_peer, peer_of
from slotcar_sidecar.ring.rings import Rings, Wish
from slotcar_sidecar.ring.tokens import Tokens
from slotcar_sidecar.rpc.access import Access
from slotcar_sidecar.rpc.convert import PLANES
from slotcar_sidecar.rpc.interceptors import Count, counted
from slotcar_sidecar.rpc.status import to_message

_log = logging.getLogger("slotcar.ring")

_NAME = "PlaneHello"
_HELLO_SECONDS = 5.0
_MOST_PENDING = 64  # a new one takes the place of the oldest
_PAUSE_SECONDS = 1.0  # when this process can open no more descriptors
_PLANES = {number: name for name, number in PLANES.items() if name != "stream"}


class Handshakes:
    """Those under way, on the event loop that it is made on; `count` is told how each ends.

    With `access` the policy says who may have what.
    """

    def __init__(self, rings: Rings, version: str, count: Count, access: Access | None = None) -> None:
        self._rings = rings
        self._version = version
        self._count = count
        self._access = access
        self._tokens = Tokens(access)
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._pending: dict[socket.socket, asyncio.TimerHandle] = {}

    def listen(self, listener: socket.socket, path: Path) -> None:
        """Serves a listening socket that is bound to `path`, and closes it at the end."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._loop.add_reader(listener, self._accept, listener, path)

    def close(self) -> None:
        """Ends what is under way, and listens no more."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for connection in tuple(self._pending):
            self._refuse_silently(connection)
        self._tokens.close()

    def _accept(self, listener: socket.socket, path: Path) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.warning("no connection can be accepted", extra={"fields": {"error": error.strerror}})
            self._loop.remove_reader(listener)
            self._loop.call_later(_PAUSE_SECONDS, self._listen_again, listener, path)
            return
        connection.setblocking(False)
        if len(self._pending) >= _MOST_PENDING:
            self._refuse_silently(next(iter(self._pending)))
        self._pending[connection] = self._loop.call_later(_HELLO_SECONDS, self._refuse_silently, connection)
        self._loop.add_reader(connection, self._read, connection, path)

    def _listen_again(self, listener: socket.socket, path: Path) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener, path)

    def _refuse_silently(self, connection: socket.socket) -> None:
        self._end(connection)
        connection.close()

    def _end(self, connection: socket.socket) -> None:
        """It is not under way any more."""
        self._loop.remove_reader(connection)
        self._pending.pop(connection).cancel()

    def _read(self, connection: socket.socket, path: Path) -> None:
        try:
            data = connection.recv(MESSAGE_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._end(connection)
        if not data or not self._welcome(connection, path, data):
            connection.close()

    def _welcome(self, connection: socket.socket, path: Path, data: bytes) -> bool:
        """Answers the hello; False unless the connection is a channel's or a token's now."""
        try:
            hello, peer = self._hello(data), peer_of(connection)
            if hello.wants_token:
                return self._tokens.give(connection, peer)
            wish = _wish(hello, peer)
            self._check(peer, wish, path)
            channel = self._rings.open(wish, connection)
        except Exception as error:
            refusal = plane_pb2.PlaneWelcome(error=to_message(counted(self._count, _NAME, error)))
            _send(lambda: connection.send(refusal.SerializeToString()))
            return False
        descriptors, slots_bytes = self._rings.descriptors(channel)
        opened = plane_pb2.PlaneOpened(region_bytes=channel.geometry.total_bytes, slots_bytes=slots_bytes)
        welcome = plane_pb2.PlaneWelcome(opened=opened).SerializeToString()
        sent = _send(lambda: socket.send_fds(connection, [welcome], descriptors))
        channel.forget_region()
        if sent:
            self._count(_NAME, "OK")
        else:
            self._rings.end(channel, "its client did not take the welcome")
        return True

    def _check(self, peer: Peer, wish: Wish, path: Path) -> None:
        """Whether the peer may have what it asks for. Raises SlotcarError."""
        if self._access is None:
            check_peer(peer, _group_of(path))
        else:
            self._access.check_peer(wish.identities, wish.session, wish.plane, str(peer))

    def _hello(self, data: bytes) -> plane_pb2.PlaneHello:
        """Raises RequestInvalid or VersionMismatch."""
        if len(data) > MESSAGE_BYTES:
            raise RequestInvalid("hello", found="more bytes", wanted=f"at most {MESSAGE_BYTES}")
        try:
            hello = plane_pb2.PlaneHello.FromString(data)
        except DecodeError:
            raise RequestInvalid(
                "hello", found=f"{len(data)} bytes that are no message", wanted="a PlaneHello"
            ) from None
        if not compatible(self._version, hello.client_version):
            raise VersionMismatch(found=hello.client_version, wanted=self._version)
        return hello


def _wish(hello: plane_pb2.PlaneHello, peer: Peer) -> Wish:
    """The plane that the hello asks for. Raises RequestInvalid or VersionMismatch."""
    if hello.layout_version != region.VERSION:
        error = VersionMismatch(
            found=f"{hello.layout_version} of the memory layout", wanted=f"{region.VERSION} of the memory layout"
        )
        error.field = "layout_version"
        raise error
    if hello.plane not in _PLANES:
        raise RequestInvalid("plane", found=hello.plane, wanted="PLANE_RING or PLANE_DIRECT")
    return Wish(SessionId(hello.session), hello.rank, _PLANES[hello.plane], hello.arena_bytes, peer.identities)


def _group_of(path: Path) -> int | None:
    """The group that the socket has now; None when it has been removed."""
    try:
        return path.stat().st_gid
    except OSError:
        return None


def _send(send: Callable[[], int]) -> bool:
    """Whether the message is on its way; a client that is gone, or does not read, gets none."""
    try:
        send()
    except OSError:
        return False
    return True
