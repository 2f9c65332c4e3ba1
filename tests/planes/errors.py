"""A refusal that came as a value, as the stub of gRPC would have raised it."""

from __future__ import annotations

import grpc
from slotcar.v1 import error_pb2


class PlaneError(grpc.RpcError):
    """Has `value` in the place of gRPC's trailers."""

    def __init__(self, error: error_pb2.Error) -> None:
        super().__init__(error.message)
        self.value = error

    def code(self) -> grpc.StatusCode:
        return next(code for code in grpc.StatusCode if code.value[0] == self.value.code)

    def details(self) -> str:
        return str(self.value.message)

    def trailing_metadata(self) -> tuple[()]:
        return ()
