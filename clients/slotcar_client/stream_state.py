"""What the stream of a session has said so far.

Invariant: `opened` comes first and once, and `layout` only moves forward.
"""

from __future__ import annotations

from slotcar.v1 import engine_service_pb2

from slotcar_client import convert
from slotcar_client.errors import AuditFailed
from slotcar_client.values import Layout


class StreamState:
    """Takes the messages in order."""

    def __init__(self) -> None:
        self._opened: engine_service_pb2.SessionOpened | None = None
        self._layout: Layout | None = None

    @property
    def has_opened(self) -> bool:
        return self._opened is not None

    @property
    def opened(self) -> engine_service_pb2.SessionOpened:
        assert self._opened is not None
        return self._opened

    @property
    def layout(self) -> Layout:
        """The newest layout that arrived."""
        assert self._layout is not None
        return self._layout

    def take(self, message: engine_service_pb2.OpenSessionResponse | engine_service_pb2.JoinSessionResponse) -> None:
        """Takes the next message. Raises AuditFailed when it is not one that may come now."""
        kind = message.WhichOneof("message")
        if self._opened is None:
            if kind != "opened":
                raise AuditFailed(f"the session's stream began with {kind}, not opened", found=kind, wanted="opened")
            self._layout = convert.layout(message.opened.layout)
            self._opened = message.opened
        elif kind == "layout":
            layout = convert.layout(message.layout)
            if layout.version.generation > self.layout.version.generation:
                self._layout = layout
