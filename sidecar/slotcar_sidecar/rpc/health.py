"""grpc.health.v1.Health: what the process is, and what its services say of it.

Invariant: what is lost or ends stays so; what each service says follows from the facts, and nobody sets it.
"""

from __future__ import annotations

import asyncio
import contextlib
from enum import StrEnum
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slotcar_sidecar.core.errors import ShuttingDown
from slotcar_sidecar.rpc.ending import ended_by

LIVENESS, READINESS, WHOLE = "liveness", "readiness", ""
SERVICES = (LIVENESS, READINESS, WHOLE)

_Response = health_pb2.HealthCheckResponse


class Phase(StrEnum):
    """Where the process is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    SHUTTING_DOWN = "shutting down"
    DEVICE_LOST = "device lost"


class Health:
    """The facts. Liveness says that the process works; readiness, and the server as a whole, that it takes sessions."""

    def __init__(self) -> None:
        self._started = self._ending = self._lost = False
        self.changed = asyncio.Event()

    def start(self) -> None:
        """The start-up has ended well."""
        self._started = True
        self._tell()

    def end(self) -> None:
        """The server takes nothing new from now on."""
        self._ending = True
        self._tell()

    def lose(self) -> None:
        """The device is lost: a process gets no other."""
        self._lost = True
        self._tell()

    @property
    def phase(self) -> Phase:
        if self._lost:
            return Phase.DEVICE_LOST
        if self._ending:
            return Phase.SHUTTING_DOWN
        return Phase.SERVING if self._started else Phase.STARTING

    def status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        """SERVICE_UNKNOWN for any name but the three."""
        if service not in SERVICES:
            return _Response.SERVICE_UNKNOWN
        is_well = not self._lost if service == LIVENESS else self.phase is Phase.SERVING
        return _Response.SERVING if is_well else _Response.NOT_SERVING

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers until `closing` is set.

    With the library's own asyncio watch, one watcher that leaves takes the notice from all others of its service, and
    one that does not read keeps the status from being set.
    """

    def __init__(self, health: Health, closing: asyncio.Event) -> None:
        self._health = health
        self._closing = closing

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self._health.status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            context.set_code(grpc.StatusCode.NOT_FOUND)
        return _Response(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext[Any, Any]
    ) -> None:
        """A watch ends when the server closes; gRPC would cancel it, and log that as a fault."""
        last = None
        with contextlib.suppress(ShuttingDown):
            async with ended_by(self._closing):
                while True:
                    changed = self._health.changed
                    status = self._health.status(request.service)
                    if status != last:
                        await context.write(_Response(status=status))
                        last = status
                    await changed.wait()
