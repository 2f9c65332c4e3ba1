"""Which transport a session uses: the one that was asked for, or the fastest that both sides can.

Invariant: `transport` is the session's only one; another that was tried is closed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import platform

from slotcar.shm.handshake import SUFFIX
from slotcar.shm.region import VERSION
from slotcar.v1 import engine_service_pb2, plane_pb2

from slotcar_client.config import client_version
from slotcar_client.errors import RequestInvalid, SlotcarError
from slotcar_client.options import SessionOptions
from slotcar_client.rpc import Rpc
from slotcar_client.transports.base import Transport
from slotcar_client.transports.connection import Connection, connect
from slotcar_client.transports.stream import StreamTransport
from slotcar_client.transports.unary import UnaryTransport

# The fastest first. Each is made with a Connect and an Rpc; its module needs torch.
_FAST = {"direct": plane_pb2.PLANE_DIRECT, "ring": plane_pb2.PLANE_RING}
_CLASSES = {"direct": "DirectTransport", "ring": "RingTransport"}

_log = logging.getLogger("slotcar.client")


class Choice:
    """Made for one session. `reason` says why `transport` is no faster one; it is empty when there is none."""

    def __init__(self, rpc: Rpc, options: SessionOptions, socket_path: str | None) -> None:
        """`socket_path` is where the server listens, if that is a unix socket."""
        self.transport: Transport = UnaryTransport(rpc) if options.transport == "unary" else StreamTransport(rpc)
        self.reason = ""
        self._rpc = rpc
        self._options = options
        self._socket_path = socket_path
        self._used: tuple[str, str] | None = None

    def use(self, opened: engine_service_pb2.SessionOpened) -> None:
        """The session is this one from now on.

        Raises RequestInvalid when the transport that was asked for cannot be, and what it raises itself; then it is
        the session's nevertheless, and connects when it is used.
        """
        wanted = self._options.transport
        before, self._used = self._used, (opened.session, opened.layout.version.epoch)
        if wanted == "auto":
            if self._used == before and self._still(opened):
                return
            self._use_fastest(opened)
        else:
            self.reason = f"{wanted} was asked for"
            if wanted in _FAST:
                self._use(wanted, opened)
            else:
                self.transport.use(opened)
        _log.info("session %.8s uses %s: %s", opened.session, self.transport.name, self.reason or "the fastest")

    def close(self) -> None:
        """Closes the transport. Idempotent."""
        self.transport.close()

    def _still(self, opened: engine_service_pb2.SessionOpened) -> bool:
        """Whether a session that was resumed can go on as it is."""
        try:
            self.transport.use(opened)
        except SlotcarError:
            return False
        return True

    def _use_fastest(self, opened: engine_service_pb2.SessionOpened) -> None:
        reasons: list[str] = []
        for name in _FAST:
            try:
                self._use(name, opened)
            except SlotcarError as error:
                reasons.append(f"{name}: {error.message}")
                continue
            break
        else:
            self._replace("stream")
            self.transport.use(opened)
        self.reason = "; ".join(reasons)

    def _use(self, name: str, opened: engine_service_pb2.SessionOpened) -> None:
        why_not = self._why_not(name, opened)
        if why_not:
            raise RequestInvalid(why_not, field="transport", found=name, wanted="auto or stream")
        self._replace(name)
        self.transport.use(opened)

    def _replace(self, name: str) -> None:
        if self.transport.name != name:
            self.transport.close()
            self.transport = StreamTransport(self._rpc) if name == "stream" else self._made(name)

    def _made(self, name: str) -> Transport:
        module = importlib.import_module(f"slotcar_client.transports.{name}")
        transport: Transport = getattr(module, _CLASSES[name])(self._connect, self._rpc)
        return transport

    def _why_not(self, name: str, opened: engine_service_pb2.SessionOpened) -> str:
        """What keeps the two sides from it, as far as it is known without trying; else nothing."""
        if self._socket_path is None:
            return "the server is not at a unix socket of this machine"
        if _FAST[name] not in opened.server.planes:
            return "the server does not offer it"
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        return _why_not_direct() if name == "direct" else ""

    def _connect(self, opened: engine_service_pb2.SessionOpened, plane: plane_pb2.Plane.ValueType) -> Connection:
        hello = plane_pb2.PlaneHello(
            session=opened.session,
            rank=self._options.rank,
            plane=plane,
            arena_bytes=self._options.arena_bytes,
            layout_version=VERSION,
            client_version=client_version(),
        )
        path = f"{self._socket_path}{SUFFIX}"
        return connect(path, hello, opened.layout.version.epoch, self._rpc.timeout_seconds)


def _why_not_direct() -> str:
    if importlib.util.find_spec("slotcar_client.transports.direct") is None:
        return "this client does not have it"
    if platform.machine() == "x86_64":
        return ""
    from slotcar_kernels import native

    return "" if native.available() else "it needs the compiled kernels on a processor that is not x86-64"
