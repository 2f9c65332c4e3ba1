"""Builds the server, runs it and shuts it down; with sockets.py the only place that makes threads, clocks, sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from slotcar.shm.slots import EPOCH_BYTES

from slotcar_sidecar import devices, memory, scrapes
from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import PLANES, Config, UnixAddress
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.core.events import EventKind, EventLog
from slotcar_sidecar.core.ids import Epoch
from slotcar_sidecar.core.journal import JournalDamaged
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.policy import Eviction
from slotcar_sidecar.core.ports import DiskTier, Environment, Limits
from slotcar_sidecar.core.reconcile import DesiredStatus
from slotcar_sidecar.core.residency import Residency
from slotcar_sidecar.core.session import Sessions
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.device.threads import compute_alone
from slotcar_sidecar.fetches import make_sources
from slotcar_sidecar.ops import logs
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.ring.handshake import Handshakes
from slotcar_sidecar.ring.rings import RingLimits, Rings, SlotsDescriptor, Surroundings
from slotcar_sidecar.ring.thread import RingThread
from slotcar_sidecar.rpc.server import Rpc, make_server
from slotcar_sidecar.sockets import StartError, bind, claimed, handshake_path, listen_for_handshakes
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.disk.folder import DiskFolder
from slotcar_sidecar.store.disk.places import NotOurs
from slotcar_sidecar.store.disk.tier import DiskTierLru, NoDisk, Threads
from slotcar_sidecar.store.host import HostTierLru
from slotcar_sidecar.store.journal import JournalFile, JournalInUse
from slotcar_sidecar.store.model import model_spec_from_file, model_spec_of
from slotcar_sidecar.store.tiers import StoreTiers
from slotcar_sidecar.sync import Reconciler

__all__ = ["StartError", "announce", "offered_planes", "run"]

_log = logging.getLogger("slotcar")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXPIRY_SECONDS = 0.25
_QUIET_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_FLUSH_SECONDS = 10.0
_REMOTE_THREADS = 4
# How long a thread of rings that wakes up waits for one that computes in Python; 5 ms, the default, are 300 Forwards.
_SWITCH_SECONDS = 0.0005
_ORDERED_MACHINES = ("x86_64", "AMD64")


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
        cache = _make_cache(config, metrics, no_fetches, resources)
        await _restore(config, cache, resources)
        await devices.warm_up(cache.device, 2 * config.compute_threads, stop, cache.environment.load_pool)
        rings = _serve_rings(config, planes, cache, metrics, resources)
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
        are_closed = await _shut_down(rpc, cache, rings, config.shutdown_seconds)
        for chore in chores:
            chore.cancel()
        await _end_tasks()
        _ignore_signals(loop)
    if not are_closed:  # gRPC's and the interpreter's end would wait for the same client
        logging.shutdown()
        os._exit(0)


def _ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """A second one must not spoil the end."""
    for number in _SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _make_cache(
    config: Config, metrics: Metrics, no_fetches: threading.Event, resources: contextlib.ExitStack
) -> AdapterCache:
    pools = [
        ThreadPoolExecutor(count, thread_name_prefix=name, initializer=compute_alone)
        for name, count in (
            ("load", config.load_threads),
            ("remote", _REMOTE_THREADS),
            ("compute", config.compute_threads),
        )
    ]
    for pool in pools:
        resources.callback(pool.shutdown, wait=False, cancel_futures=True)
    load_pool, remote_pool, compute_pool = pools
    new_id = functools.partial(secrets.token_hex, 16)
    environment = Environment(load_pool, remote_pool, compute_pool, time.monotonic, new_id, metrics)
    events = EventLog(time.time)
    host = HostTierLru(config.host_bytes)
    base = _open_base(config)
    source = make_sources(config, base, metrics, no_fetches)
    resources.callback(no_fetches.set)
    layout = Layout.empty(Epoch(secrets.token_hex(EPOCH_BYTES // 2)), config.slots)
    device = devices.make_device(config, str(layout.epoch))
    events.listeners += [functools.partial(logs.log_event, layout.epoch), metrics.event]
    disk = _open_disk(config, environment, resources)
    tiers = StoreTiers(source, host, disk, environment, config.max_adapter_bytes, base)
    cache = AdapterCache(
        Residency(layout, events, tiers.forget, config.max_adapters, Eviction(config.eviction)),
        Sessions(config.max_sessions, config.max_mappings),
        tiers,
        device,
        environment,
        Limits(
            config.device_bytes,
            config.max_entries,
            config.max_rows,
            config.max_response_bytes,
            config.max_holds,
            config.mapping_idle_seconds,
        ),
    )
    model = _read_model(config, base)
    if model is not None:
        try:
            cache.adopt_model(model)
        except SlotcarError as error:
            raise StartError(error.message) from error
        _log.info("model", extra={"fields": {"sites": len(model.sites), "slot_bytes": device.slot_bytes()}})
    metrics.build(
        version=version("slotcar"),
        epoch=str(layout.epoch),
        device="cpu" if isinstance(device, CpuDevice) else "cuda",
        slot_dtype=config.dtype,
        kernel=device.kernel,
    )
    scrapes.watch(metrics, cache, config)
    return cache


def _open_disk(config: Config, environment: Environment, resources: contextlib.ExitStack) -> DiskTier:
    """The disk tier of the settings; one that cannot be used is none. Raises StartError for what is wrongly set."""
    if config.disk is None:
        return NoDisk()
    try:
        folder = DiskFolder.open(config.disk, secrets.token_hex(8), config.disk_bytes, time.time)
    except (NotOurs, FileNotFoundError) as error:
        raise StartError(f"--disk {config.disk} cannot be used: {error}") from error
    except OSError as error:
        _log.warning("no disk tier", extra={"fields": {"disk": config.disk, "reason": error.strerror}})
        return NoDisk()
    resources.callback(folder.close)
    pool = ThreadPoolExecutor(1, thread_name_prefix="disk", initializer=compute_alone)
    resources.callback(pool.shutdown, wait=True, cancel_futures=True)
    tell = asyncio.get_running_loop().call_soon_threadsafe
    return DiskTierLru(folder, Threads(environment.load_pool, pool, tell), environment.observer)


async def _restore(config: Config, cache: AdapterCache, resources: contextlib.ExitStack) -> None:
    """Takes the journal of the settings, and the names that are on disk. Raises StartError."""
    if config.journal is None:
        return
    try:
        journal = JournalFile(config.journal)
        resources.callback(journal.close)
        try:
            entries = journal.read()
        except JournalDamaged as error:
            entries = ()
            reason = f"the journal is damaged, and is {journal.set_aside()} now: {error}"
            _log.warning("no journal", extra={"fields": {"reason": reason}})
            cache.events.record(EventKind.STORAGE_FAULT, cache.layout.generation, reason=reason)
    except (JournalInUse, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise StartError(f"--journal {config.journal} cannot be used: {why}") from error
    await cache.restore(entries, journal)
    _log.info("journal", extra={"fields": {"names": len(entries), "back": len(cache.residency.names)}})


def _open_base(config: Config) -> BaseModel | None:
    """The base model that some adapters need, or None. Raises StartError."""
    if config.base_model is None:
        return None
    try:
        return BaseModel(config.base_model)
    except (SlotcarError, OSError) as error:
        raise StartError(str(error)) from error


def _read_model(config: Config, base: BaseModel | None) -> ModelSpec | None:
    """The model that the settings name, or None. Raises StartError."""
    try:
        if config.model_spec is not None:
            return model_spec_from_file(config.model_spec)
        if base is not None:
            return model_spec_of(base.checkpoint)
    except (SlotcarError, OSError) as error:
        raise StartError(str(error)) from error
    return None


def offered_planes(config: Config) -> tuple[str, ...]:
    """What the settings and this machine allow: shared memory needs a unix socket, and ordered reads and writes.

    No engine can map slots that are on a GPU. Raises StartError for a GPU that cannot be used.
    """
    is_ordered = platform.machine() in _ORDERED_MACHINES or CpuDevice.kernel != "torch"
    shares = is_ordered and any(isinstance(address, UnixAddress) for address in config.addresses)
    possible = {"stream": True, "ring": shares, "direct": shares and not devices.is_on_gpu(config)}
    return tuple(plane for plane in PLANES if plane in config.planes and possible[plane])


def _serve_rings(
    config: Config, planes: tuple[str, ...], cache: AdapterCache, metrics: Metrics, resources: contextlib.ExitStack
) -> Rings:
    """Starts the threads of rings and listens for hand-shakes; without a plane in shared memory there are none."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    # It has no effect but that a system call of the thread that gets it returns.
    signal.signal(signal.SIGURG, lambda *_: None)
    threads: dict[RingThread, threading.Thread] = {}

    def call_back(ring: RingThread) -> None:
        ident = threads[ring].ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGURG)

    tell = asyncio.get_running_loop().call_soon_threadsafe
    around = Surroundings(tell, call_back, functools.partial(_slots_descriptor, cache), metrics.rpc)
    shared = tuple(plane for plane in planes if plane != "stream")
    limits = RingLimits(shared, config.ring_bytes, config.max_rings)
    rings = Rings(cache, limits, config.compute_threads if shared else 0, around)
    for number, ring in enumerate(rings.threads):
        threads[ring] = threading.Thread(target=_run_ring, args=(ring,), name=f"ring-{number}")
        threads[ring].start()
    resources.callback(_end_rings, rings, threads.values())
    handshakes = Handshakes(rings, version("slotcar"), metrics.rpc)
    resources.callback(handshakes.close)
    for address in config.addresses if shared else ():
        if isinstance(address, UnixAddress):
            path = handshake_path(address)
            handshakes.listen(listen_for_handshakes(path), path)
    return rings


def _run_ring(ring: RingThread) -> None:
    compute_alone()
    ring.run()


def _end_rings(rings: Rings, threads: Iterable[threading.Thread]) -> None:
    rings.close()
    for thread in threads:
        thread.join()
    rings.finish()


def _slots_descriptor(cache: AdapterCache) -> SlotsDescriptor | None:
    file = cache.device.file if isinstance(cache.device, CpuDevice) else None
    return None if file is None else SlotsDescriptor(file.descriptor, file.geometry.total_bytes)


async def _expire(cache: AdapterCache, rings: Rings) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_SECONDS)
        rings.look()
        cache.expire()


async def _flush(cache: AdapterCache) -> None:
    while True:
        await asyncio.sleep(_FLUSH_SECONDS)
        cache.tiers.disk.flush()


async def _shut_down(rpc: Rpc, cache: AdapterCache, rings: Rings, seconds: float) -> bool:
    """Takes no new sessions or loads, serves until no Forward has come for a moment or the time is over, and closes.

    Returns whether every connection could be closed.
    """
    _log.info("shutting down", extra={"fields": {"sessions": len(cache.sessions), "deadline_seconds": seconds}})
    await rpc.health.tell(alive=True, ready=False)
    cache.shut_down()
    start = time.monotonic()
    deadline = start + seconds
    while len(cache.sessions) and (now := time.monotonic()) < deadline:
        if not cache.forwards_in_flight and now - max(cache.last_forward_at, start) > _QUIET_SECONDS:
            break
        await asyncio.sleep(_QUIET_SECONDS / 10)
    await cache.flush()
    rings.close()
    cache.close()
    are_closed = await _close_connections(rpc)
    if not are_closed:
        _log.warning("a client takes nothing of what was sent to it: its connection ends with the process")
    _log.info("stopped")
    return are_closed


async def _close_connections(rpc: Rpc) -> bool:
    """False when gRPC waits for a peer that takes nothing of what was sent to it: it does so without a limit."""
    stop = asyncio.ensure_future(rpc.server.stop(_CLOSE_SECONDS))
    _, late = await asyncio.wait([stop], timeout=2 * _CLOSE_SECONDS)
    return not late


async def _end_tasks() -> None:
    """Lets what still runs come to its end: gRPC logs as a fault what the loop would cancel."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
