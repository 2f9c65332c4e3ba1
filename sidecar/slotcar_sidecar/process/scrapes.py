"""Serves /metrics: each scrape asks the cache's owner for one snapshot, however many adapters there are."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from prometheus_client import start_http_server

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import Config, TcpAddress
from slotcar_sidecar.core.pins import MappingOwner
from slotcar_sidecar.ops.gauges import Naming, ResidentName, Snapshot
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.process.sockets import StartError

__all__ = ["serve_metrics", "take_snapshot", "watch"]

_log = logging.getLogger("slotcar")

_SNAPSHOT_SECONDS = 5.0


def watch(metrics: Metrics, cache: AdapterCache, config: Config) -> None:
    """Shows the cache's state in the metrics; call it on the owner's thread."""
    loop = asyncio.get_running_loop()

    async def take() -> Snapshot:
        return take_snapshot(cache, config.metrics_adapters, time.time())

    def read() -> Snapshot:
        """The cache's owner is one thread; scrapes come in others."""
        return asyncio.run_coroutine_threadsafe(take(), loop).result(_SNAPSHOT_SECONDS)

    metrics.watch(read, Naming(config.metrics_adapters > 0, config.metrics_lora_info))


def take_snapshot(cache: AdapterCache, most_names: int, now: float) -> Snapshot:
    """What gauges show of the cache, on the owner's thread; `now` is in Unix seconds."""
    residency = cache.residency
    pins = Counter({"mapping": 0, "hold": 0})
    for owners in residency.pins.owners.values():
        pins.update("mapping" if isinstance(owner, MappingOwner) else "hold" for owner in owners)
    return Snapshot(
        time=now,
        layout=residency.layout,
        capacity=cache.capacity(),
        pins=pins,
        holds=len(residency.holds),
        mappings=sum(len(session.mappings) for session in cache.sessions),
        residents=tuple(islice(_residents(cache, most_names), most_names)),
        waiting=tuple(sorted(cache.awaited())[:most_names]),
    )


def _residents(cache: AdapterCache, most_names: int) -> Iterator[ResidentName]:
    """By their names, the latest used first; what has just been loaded may have none yet."""
    residency = cache.residency
    for digest in residency.residents():
        slot = residency.readable_slot(digest)
        assert slot is not None, "residents are in slots"
        for name in heapq.nsmallest(most_names, residency.names.named(digest)):
            size = residency.names.adapter(digest).bytes
            yield ResidentName(name, digest, slot, len(residency.pins.of(slot)), size)


def serve_metrics(address: TcpAddress, metrics: Metrics, resources: contextlib.ExitStack) -> None:
    """Answers scrapes until `resources` are closed. Raises StartError."""
    try:
        server, _ = start_http_server(address.port, address.host, metrics.registry)
    except OSError as error:
        raise StartError(f"cannot serve metrics at {address.authority}: {error}") from error
    resources.callback(server.server_close)
    resources.callback(server.shutdown)
    port = server.server_address[1]
    _log.info("metrics", extra={"fields": {"at": f"http://{TcpAddress(address.host, port).authority}/metrics"}})
