"""Serves health alone, in plaintext, for probes that can ask nothing else; before there is a server and after it.

It takes no part in how the server shuts down, and nothing else of slotcar is there.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

from slotcar_sidecar.config import TcpAddress
from slotcar_sidecar.process.ending import close_connections
from slotcar_sidecar.process.sockets import bind
from slotcar_sidecar.rpc.health import Health
from slotcar_sidecar.rpc.server import make_health_server

__all__ = ["Probes"]

_log = logging.getLogger("slotcar")


class Probes:
    """Answers at `address`, if there is one, while the context is open."""

    def __init__(self, address: TcpAddress | None, health: Health) -> None:
        self._address = address
        self._closing = asyncio.Event()
        self._server = make_health_server(health, self._closing)
        self.are_closed = True

    async def __aenter__(self) -> Self:
        """Raises StartError."""
        if self._address is not None:
            at = bind(self._server, self._address)
            await self._server.start()
            _log.info("health", extra={"fields": {"at": at}})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Then `are_closed` says whether every connection could be closed."""
        self._closing.set()
        if self._address is not None:
            self.are_closed = await close_connections(self._server)
