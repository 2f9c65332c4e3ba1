"""One stream of a session, read by one thread for as long as it lives.

Invariant: `ended` never turns back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
from slotcar.v1 import engine_service_pb2

from slotcar_client.errors import DeadlineExceeded, SlotcarError, Unavailable, from_rpc_error
from slotcar_client.rpc import Rpc
from slotcar_client.stream_state import StreamState
from slotcar_client.values import Layout

OnEnd = Callable[["SessionStream"], None]


class SessionStream:
    """The session `opened` for as long as the stream lives. `on_end` is called in the reading thread when it ends."""

    def __init__(
        self,
        rpc: Rpc,
        request: engine_service_pb2.OpenSessionRequest | engine_service_pb2.JoinSessionRequest,
        on_end: OnEnd,
    ) -> None:
        """Opens the stream and waits for its first message. Raises SlotcarError."""
        self._on_end = on_end
        self._first = threading.Event()
        self._state = StreamState()
        self.error: SlotcarError | None = None
        self._ended = threading.Event()
        self._call = rpc.stream(request)
        self._thread = threading.Thread(target=self._read, name="slotcar-session", daemon=True)
        self._thread.start()
        if not self._first.wait(rpc.timeout_seconds):
            self._call.cancel()
            raise DeadlineExceeded(f"no session within {rpc.timeout_seconds:g} s")
        if not self._state.has_opened:
            raise self.error or Unavailable("the server ended the session's stream before it opened")

    @property
    def opened(self) -> engine_service_pb2.SessionOpened:
        return self._state.opened

    @property
    def layout(self) -> Layout:
        """The newest layout that arrived."""
        return self._state.layout

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
                self._state.take(message)
                self._first.set()
        except grpc.RpcError as error:
            self.error = from_rpc_error(error)
        except SlotcarError as error:
            self.error = error
            self._call.cancel()
        self._ended.set()
        self._first.set()
        if self._state.has_opened:
            self._on_end(self)
