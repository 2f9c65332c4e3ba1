"""Builds the server, runs it and shuts it down; with `process` the only place that makes threads, clocks, sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import Address, Config, UnixAddress
from slotcar_sidecar.core.errors import ShuttingDown
from slotcar_sidecar.core.reconcile import DesiredStatus
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.process import devices, logs, memory
from slotcar_sidecar.process.caches import make_cache, restore
from slotcar_sidecar.process.ending import Stop, catch_signals, end_chores, end_tasks, ignore_signals, leave, shut_down
from slotcar_sidecar.process.operations import make_operations
from slotcar_sidecar.process.pages import Seen, serve_pages
from slotcar_sidecar.process.planes import Shared, offered_planes, serve_rings
from slotcar_sidecar.process.policy import make_access
from slotcar_sidecar.process.probes import Probes
from slotcar_sidecar.process.reload import Reloads
from slotcar_sidecar.process.sockets import Doors, StartError, bind, claimed, handshake_path
from slotcar_sidecar.process.states import FollowedFiles
from slotcar_sidecar.process.tls import make_certificates
from slotcar_sidecar.process.traces import make_traces
from slotcar_sidecar.ring.rings import Rings
from slotcar_sidecar.rpc.access import Access
from slotcar_sidecar.rpc.ending import ended_by
from slotcar_sidecar.rpc.health import Health
from slotcar_sidecar.rpc.server import Serving, make_server
from slotcar_sidecar.sync import Reconciler

__all__ = ["StartError", "announce", "run"]

_log = logging.getLogger("slotcar")

_EXPIRY_SECONDS = 0.25
_FLUSH_SECONDS = 10.0


def announce(config: Config) -> logs.Output:
    """Starts the log with the settings in force. Raises StartError."""
    output = logs.start(config)
    _log.info("settings", extra={"fields": config.to_dict()})
    if not config.root and not config.source:
        _log.warning("no --root and no --source is set, so no adapter can be loaded")
    return output


async def run(config: Config, output: logs.Output) -> None:
    """Serves until SIGTERM, SIGINT or Shutdown. Raises StartError."""
    memory.keep_freed()
    memory.freeze_imported()
    health, are_closed = Health(), False
    async with Probes(config.health_address, health) as probes:
        with contextlib.ExitStack() as resources, contextlib.suppress(ShuttingDown):
            are_closed = await _serve(config, output, health, resources)
    await end_tasks()
    _log.info("stopped")
    ignore_signals()
    # Nor waits anybody for the threads of a start that was given up.
    if not (are_closed and probes.are_closed):
        leave()


async def _serve(config: Config, output: logs.Output, health: Health, resources: contextlib.ExitStack) -> bool:
    """Returns whether every connection could be closed. Raises StartError, or ShuttingDown when it ends before that."""
    traces = make_traces(config, resources)
    metrics = Metrics(traces)
    output.observe(metrics)
    stop, reloads = Stop(config.shutdown_seconds, health), Reloads(metrics)
    catch_signals(stop, reloads)
    output.follow(config, reloads)
    planes = offered_planes(config)
    _claim(config, resources)
    no_fetches = threading.Event()
    async with ended_by(stop.asked):
        cache = await make_cache(config, metrics, no_fetches, resources)
        await restore(config, cache, resources)
    await devices.warm_up(cache.device, 2 * config.compute_threads, stop.asked, cache.environment.load_pool)
    stop.check()
    access = make_access(config, cache, reloads)
    certificates = make_certificates(config, reloads, metrics.certificate)
    rings = serve_rings(config, planes, Shared(cache, metrics, access), resources)
    reconciler = None
    if config.adapters is not None:
        reconciler = Reconciler(cache, config.adapters, config.adapters_poll_seconds, metrics)
        reloads.add("declared set", tuple, reconciler.look)
    desired = reconciler.status if reconciler is not None else DesiredStatus
    worst = reconciler.worst if reconciler is not None else lambda _: DesiredStatus()
    files = FollowedFiles(certificates.ends if certificates else dict, reloads.not_in_force)
    metrics_url = serve_pages(config, cache, metrics, Seen(planes, lambda: health.phase, worst, files), resources)
    served: list[Address] = []
    operations = make_operations(config, stop, served, metrics_url)
    serving = Serving(
        config.max_message_bytes,
        config.heartbeat_seconds,
        metrics.rpc,
        planes=planes,
        desired=desired,
        health=health,
        operations=operations,
        begin_span=traces.begin if traces else None,
        access=access,
        max_streams=config.max_streams,
        max_watchers=config.max_watchers,
    )
    server = make_server(cache, serving)
    credentials = certificates.credentials if certificates else None
    served += (bind(server, address, Doors.of(config), credentials) for address in config.addresses)
    await server.start()
    health.start()
    where = " and ".join(str(address) for address in served)
    facts = {"at": where, "epoch": cache.layout.epoch, "slots": config.slots, "planes": " ".join(planes)}
    _log.info("serving", extra={"fields": facts})
    chores = [_expire(cache, rings, access), cache.restored(), _flush(cache), memory.return_freed(), reloads.run()]
    chores += [devices.watch(cache.device, health), *([reconciler.run()] if reconciler is not None else ())]
    tasks = [asyncio.create_task(chore) for chore in chores]
    await stop.asked.wait()
    no_fetches.set()
    are_closed = await shut_down(server, cache, rings, stop)
    await end_chores(tasks)
    return are_closed


def _claim(config: Config, resources: contextlib.ExitStack) -> None:
    """Makes the paths of the unix sockets this server's own. Raises StartError."""
    for address in config.addresses:
        if isinstance(address, UnixAddress):
            resources.enter_context(claimed(address.path))
            if config.shakes_hands:
                resources.enter_context(claimed(handshake_path(address), socket.SOCK_SEQPACKET))


async def _expire(cache: AdapterCache, rings: Rings, access: Access | None) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_SECONDS)
        rings.look()
        cache.expire()
        if access is not None:
            access.look()


async def _flush(cache: AdapterCache) -> None:
    while True:
        await asyncio.sleep(_FLUSH_SECONDS)
        cache.tiers.disk.flush()
