"""What a session asks of a transport.

A transport of a faster plane is made with `(connect, rpc)`: `connect(opened, plane)` gives a Connection for the session
of `opened`, with the session's rank and size of arena; `rpc` carries the calls that do not travel on the plane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from slotcar.v1 import engine_service_pb2

from slotcar_client.effects import Call, Forward

if TYPE_CHECKING:
    import torch


class Sent(Protocol):
    """A Forward that was sent ahead of the wish for its result."""

    def done(self) -> bool:
        """Whether `collect` would not wait."""

    def collect(self, timeout_seconds: float) -> dict[str, torch.Tensor] | None:
        """{site: output}, or None when it has to be computed again, as its connection is gone. Raises SlotcarError."""


class Transport(Protocol):
    """Carries what a session asks for, one call at a time; the caller's lock orders the calls."""

    @property
    def name(self) -> str:
        """Which one it is, for people."""

    def use(self, opened: engine_service_pb2.SessionOpened) -> None:
        """The session is this one from now on; a transport that needs a connection for it makes it.

        Called before the first call, and again whenever the session was opened anew or resumed: a connection that is
        for the same session and epoch stays. Raises SlotcarError; a call then tries again to connect.
        """

    def forward(self, forward: Forward) -> dict[str, torch.Tensor]:
        """{site: output}, computed with the digests of the mapping. Raises SlotcarError; the next call may succeed."""

    def send(self, forward: Forward) -> Sent | None:
        """Begins a Forward; None when this transport has no way to go on before it ends. Raises SlotcarError."""

    def call(self, call: Call) -> Any:
        """The response to one RPC that the server does not queue. Raises SlotcarError."""

    def close(self) -> None:
        """Ends what it holds open. Idempotent."""
