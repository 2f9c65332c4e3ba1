"""What a session asks of a transport."""

from __future__ import annotations

from typing import Protocol

from slotcar.v1 import engine_service_pb2


class Transport(Protocol):
    """Carries Forwards, one at a time; the caller's lock orders the calls."""

    @property
    def name(self) -> str:
        """Which one it is, for people."""

    def forward(self, request: engine_service_pb2.ForwardRequest) -> engine_service_pb2.ForwardResponse:
        """The answer to one request. Raises SlotcarError; the next call may succeed."""

    def close(self) -> None:
        """Ends what it holds open. Idempotent."""
