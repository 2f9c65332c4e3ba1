"""One OpenSession stream, read by one thread for as long as it lives.

Invariant: `layout` only moves forward, and `ended` never turns back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
from slotcar.v1 import engine_service_pb2

from slotcar_client import convert
from slotcar_client.errors import AuditFailed, DeadlineExceeded, SlotcarError, Unavailable, from_rpc_error
from slotcar_client.rpc import Rpc
from slotcar_client.values import Layout, ServerInfo

OnEnd = Callable[["SessionStream"], None]


class SessionStream:
    """The session `opened` for as long as the stream lives. `on_end` is called in the reading thread when it ends."""

    def __init__(self, rpc: Rpc, request: engine_service_pb2.OpenSessionRequest, on_end: OnEnd) -> None:
        """Opens the stream and waits for its first message. Raises SlotcarError."""
        self._on_end = on_end
        self._first = threading.Event()
        self._opened: engine_service_pb2.SessionOpened | None = None
        self._server: ServerInfo | None = None
        self._layout: Layout | None = None
        self._error: SlotcarError | None = None
        self._ended = threading.Event()
        self._call = rpc.engine.OpenSession(request)
        self._thread = threading.Thread(target=self._read, name="slotcar-session", daemon=True)
        self._thread.start()
        if not self._first.wait(rpc.timeout_seconds):
            self._call.cancel()
            raise DeadlineExceeded(f"no session within {rpc.timeout_seconds:g} s")
        if self._opened is None:
            raise self._error or Unavailable("the server ended the session's stream before it opened")

    @property
    def opened(self) -> engine_service_pb2.SessionOpened:
        assert self._opened is not None
        return self._opened

    @property
    def server(self) -> ServerInfo:
        """What the server is and accepts."""
        assert self._server is not None
        return self._server

    @property
    def layout(self) -> Layout:
        """The newest layout that arrived."""
        assert self._layout is not None
        return self._layout

    @property
    def ended(self) -> bool:
        """The stream is gone; the session lives on for its grace."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Ends the stream from this side. Idempotent."""
        self._call.cancel()

    def join(self, timeout_seconds: float) -> None:
        """Waits until the reading thread has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)

    def _read(self) -> None:
        try:
            for message in self._call:
                self._take(message)
        except grpc.RpcError as error:
            self._error = from_rpc_error(error)
        except SlotcarError as error:
            self._error = error
            self._call.cancel()
        self._ended.set()
        self._first.set()
        if self._opened is not None:
            self._on_end(self)

    def _take(self, message: engine_service_pb2.OpenSessionResponse) -> None:
        kind = message.WhichOneof("message")
        if self._opened is None:
            if kind != "opened":
                raise AuditFailed(f"the session's stream began with {kind}, not opened", found=kind, wanted="opened")
            self._layout = convert.layout(message.opened.layout)
            self._server = convert.server_info(message.opened.server)
            self._opened = message.opened
            self._first.set()
        elif kind == "layout":
            layout = convert.layout(message.layout)
            if layout.version.generation > self.layout.version.generation:
                self._layout = layout
