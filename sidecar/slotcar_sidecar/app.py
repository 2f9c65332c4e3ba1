"""Builds the server, runs it and shuts it down; with `process` the only place that makes threads, clocks, sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import Config, UnixAddress
from slotcar_sidecar.core.reconcile import DesiredStatus
from slotcar_sidecar.ops import logs
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.process import devices, memory, scrapes
from slotcar_sidecar.process.caches import make_cache, restore
from slotcar_sidecar.process.ending import end_tasks, shut_down
from slotcar_sidecar.process.planes import offered_planes, serve_rings
from slotcar_sidecar.process.sockets import StartError, bind, claimed, handshake_path
from slotcar_sidecar.ring.rings import Rings
from slotcar_sidecar.rpc.server import make_server
from slotcar_sidecar.sync import Reconciler

__all__ = ["StartError", "announce", "run"]

_log = logging.getLogger("slotcar")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXPIRY_SECONDS = 0.25
_FLUSH_SECONDS = 10.0


def announce(config: Config) -> None:
    """Starts the log with the settings in force."""
    logs.configure(config.log_format)
    _log.info("settings", extra={"fields": config.to_dict()})
    if not config.root and not config.source:
        _log.warning("no --root and no --source is set, so no adapter can be loaded")


async def run(config: Config) -> None:
    """Serves until SIGTERM or SIGINT. Raises StartError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    memory.keep_freed()
    memory.freeze_imported()
    with contextlib.ExitStack() as resources:
        planes = offered_planes(config)
        for address in config.addresses:
            if isinstance(address, UnixAddress):
                resources.enter_context(claimed(address.path))
                if len(planes) > 1:
                    resources.enter_context(claimed(handshake_path(address), socket.SOCK_SEQPACKET))
        metrics = Metrics()
        no_fetches = threading.Event()
        cache = make_cache(config, metrics, no_fetches, resources)
        await restore(config, cache, resources)
        await devices.warm_up(cache.device, 2 * config.compute_threads, stop, cache.environment.load_pool)
        rings = serve_rings(config, planes, cache, metrics, resources)
        if config.metrics_address is not None:
            scrapes.serve_metrics(config.metrics_address, metrics, resources)
        reconciler = None
        if config.adapters is not None:
            reconciler = Reconciler(cache, config.adapters, config.adapters_poll_seconds, metrics)
        desired = reconciler.status if reconciler is not None else DesiredStatus
        rpc = make_server(cache, config.max_message_bytes, config.heartbeat_seconds, metrics.rpc, planes, desired)
        served = [bind(rpc.server, address) for address in config.addresses]
        await rpc.server.start()
        await rpc.health.tell(alive=True, ready=True)
        where = " and ".join(str(address) for address in served)
        facts = {"at": where, "epoch": cache.layout.epoch, "slots": config.slots, "planes": " ".join(planes)}
        _log.info("serving", extra={"fields": facts})
        chores = [
            asyncio.create_task(chore)
            for chore in (
                _expire(cache, rings),
                cache.restored(),
                _flush(cache),
                memory.return_freed(),
                devices.watch(cache.device, rpc.health),
            )
        ]
        if reconciler is not None:
            chores.append(asyncio.create_task(reconciler.run()))
        await stop.wait()
        no_fetches.set()
        are_closed = await shut_down(rpc, cache, rings, config.shutdown_seconds)
        for chore in chores:
            chore.cancel()
        await end_tasks()
        _ignore_signals(loop)
    if not are_closed:  # gRPC's and the interpreter's end would wait for the same client
        logging.shutdown()
        os._exit(0)


def _ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """A second one must not spoil the end."""
    for number in _SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


async def _expire(cache: AdapterCache, rings: Rings) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_SECONDS)
        rings.look()
        cache.expire()


async def _flush(cache: AdapterCache) -> None:
    while True:
        await asyncio.sleep(_FLUSH_SECONDS)
        cache.tiers.disk.flush()
