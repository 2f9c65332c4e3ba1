"""grpc.health.v1.Health, whose watchers know nothing of each other.

With the library's own asyncio watch, one watcher that leaves takes the notice from all others of its service, and one
that does not read keeps `set` from returning. Check, and all else, is the library's.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as library

from slotcar_sidecar.core.errors import ShuttingDown
from slotcar_sidecar.rpc.ending import ended_by


class Health(library.HealthServicer):  # type: ignore[misc]
    """A watch ends when the server closes; gRPC would cancel it, and log that as a fault."""

    def __init__(self, closing: asyncio.Event) -> None:
        super().__init__()
        self._closing = closing
        self._changed = asyncio.Event()

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        self._server_status[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def tell(self, *, alive: bool, ready: bool) -> None:
        """Liveness says that the process works; readiness, and the server as a whole, that it takes new sessions."""
        for service, is_so in (("liveness", alive), ("readiness", ready), ("", ready)):
            status = health_pb2.HealthCheckResponse
            await self.set(service, status.SERVING if is_so else status.NOT_SERVING)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext[Any, Any]
    ) -> None:
        last = None
        with contextlib.suppress(ShuttingDown):
            async with ended_by(self._closing):
                while True:
                    changed = self._changed
                    status = self._server_status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                    if status != last:
                        await context.write(health_pb2.HealthCheckResponse(status=status))
                        last = status
                    await changed.wait()
