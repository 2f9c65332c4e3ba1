"""Forward as a unary call: no state, one more round of thread hand-offs than the stream."""

from __future__ import annotations

from slotcar.v1 import engine_service_pb2

from slotcar_client.effects import Call
from slotcar_client.rpc import Rpc


class UnaryTransport:
    name = "unary"

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    def forward(self, request: engine_service_pb2.ForwardRequest) -> engine_service_pb2.ForwardResponse:
        response: engine_service_pb2.ForwardResponse = self._rpc.call(Call(request))
        return response

    def close(self) -> None:
        """Nothing is open."""
