"""Forward as a unary call: no state, one more round of thread hand-offs than the stream."""

from __future__ import annotations

from slotcar.v1 import engine_service_pb2

from slotcar_client.rpc import Rpc


class UnaryTransport:
    name = "unary"

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    def forward(self, request: engine_service_pb2.ForwardRequest) -> engine_service_pb2.ForwardResponse:
        return self._rpc.call(self._rpc.engine.Forward, request)

    def close(self) -> None:
        """Nothing is open."""
