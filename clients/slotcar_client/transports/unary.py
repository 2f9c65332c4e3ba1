"""Forward as a unary call: no state, one more round of thread hand-offs than the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slotcar.v1 import engine_service_pb2

from slotcar_client.effects import Call, Forward
from slotcar_client.rpc import Rpc

if TYPE_CHECKING:
    import torch


class UnaryTransport:
    name = "unary"

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    def use(self, opened: engine_service_pb2.SessionOpened) -> None:
        """A Forward names its session."""

    def send(self, forward: Forward) -> None:
        """A call ends before the next begins."""

    def forward(self, forward: Forward) -> dict[str, torch.Tensor]:
        from slotcar_client import torch_tensors

        outgoing = torch_tensors.to_request(forward)
        return torch_tensors.to_outputs(forward, outgoing, self._rpc.call(Call(outgoing.request)))

    def call(self, call: Call) -> Any:
        return self._rpc.call(call)

    def close(self) -> None:
        """Nothing is open."""
