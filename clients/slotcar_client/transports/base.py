"""What a session asks of a transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from slotcar_client.effects import Call, Forward

if TYPE_CHECKING:
    import torch


class Transport(Protocol):
    """Carries what a session asks for, one call at a time; the caller's lock orders the calls."""

    @property
    def name(self) -> str:
        """Which one it is, for people."""

    def forward(self, forward: Forward) -> dict[str, torch.Tensor]:
        """{site: output}, computed with the digests of the mapping. Raises SlotcarError; the next call may succeed."""

    def call(self, call: Call) -> Any:
        """The response to one RPC that the server does not queue. Raises SlotcarError."""

    def close(self) -> None:
        """Ends what it holds open. Idempotent."""
