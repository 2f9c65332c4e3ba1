"""Builds the server, runs it and shuts it down; the only place that makes threads, clocks and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import secrets
import signal
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from grpc import aio
from grpc_health.v1 import health_pb2
from prometheus_client import start_http_server
from slotcar.shm.slots import EPOCH_BYTES

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import Address, Config, TcpAddress, UnixAddress
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.core.events import EventLog
from slotcar_sidecar.core.ids import Epoch
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.ports import Environment, Limits
from slotcar_sidecar.core.residency import Residency
from slotcar_sidecar.core.session import Sessions
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.device.threads import compute_pool_initializer
from slotcar_sidecar.ops import logs
from slotcar_sidecar.ops.metrics import Metrics, Snapshot
from slotcar_sidecar.rpc.health import Health
from slotcar_sidecar.rpc.server import Rpc, make_server
from slotcar_sidecar.store.host import HostTierLru
from slotcar_sidecar.store.model import model_spec_from_file, model_spec_from_folder
from slotcar_sidecar.store.source import LocalSource
from slotcar_sidecar.store.tiers import SourceAndHost

_log = logging.getLogger("slotcar")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXPIRY_SECONDS = 0.25
_QUIET_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_SNAPSHOT_SECONDS = 5.0
_TRIM_SECONDS = 20.0


class StartError(Exception):
    """Why the server cannot start."""


def announce(config: Config) -> None:
    """Starts the log with the settings in force."""
    logs.configure(config.log_format)
    _log.info("settings", extra={"fields": config.to_dict()})
    if not config.root:
        _log.warning("no --root is set, so no adapter can be loaded")


async def run(config: Config) -> None:
    """Serves until SIGTERM or SIGINT. Raises StartError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    _keep_freed_memory()
    with contextlib.ExitStack() as resources:
        for address in config.addresses:
            if isinstance(address, UnixAddress):
                resources.enter_context(_claimed(address.path))
        metrics = Metrics()
        cache = _make_cache(config, metrics, resources)
        if config.metrics_address is not None:
            _serve_metrics(config.metrics_address, metrics, resources)
        rpc = make_server(cache, config.max_message_bytes, config.heartbeat_seconds, metrics.rpc)
        served = [_bind(rpc.server, address) for address in config.addresses]
        await rpc.server.start()
        await _set_health(rpc.health, serving=True)
        where = " and ".join(str(address) for address in served)
        _log.info("serving", extra={"fields": {"at": where, "epoch": cache.layout.epoch, "slots": config.slots}})
        chores = [asyncio.create_task(chore) for chore in (_expire(cache), _return_freed_memory())]
        await stop.wait()
        await _shut_down(rpc, cache, config.shutdown_seconds)
        for chore in chores:
            chore.cancel()
        await _end_tasks()
        for number in _SIGNALS:  # a second one must not spoil the end
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _make_cache(config: Config, metrics: Metrics, resources: contextlib.ExitStack) -> AdapterCache:
    initializer = functools.partial(compute_pool_initializer, 1)
    pools = [
        ThreadPoolExecutor(count, thread_name_prefix=name, initializer=initializer)
        for name, count in (("load", config.load_threads), ("compute", config.compute_threads))
    ]
    for pool in pools:
        resources.callback(pool.shutdown, wait=False, cancel_futures=True)
    load_pool, compute_pool = pools
    environment = Environment(load_pool, compute_pool, time.monotonic, lambda: secrets.token_hex(16), metrics)
    events = EventLog(time.time)
    host = HostTierLru(config.host_bytes)
    source = LocalSource(config.root, config.max_adapter_bytes)
    layout = Layout.empty(Epoch(secrets.token_hex(EPOCH_BYTES // 2)), config.slots)
    device = CpuDevice(config.slots, config.max_rank, config.dtype, epoch=str(layout.epoch))
    events.listeners += [functools.partial(logs.log_event, layout.epoch), metrics.event]
    cache = AdapterCache(
        Residency(layout, events, host.drop, config.max_adapters),
        Sessions(config.max_sessions, config.max_mappings),
        SourceAndHost(source, host, config.max_adapter_bytes, load_pool, metrics, time.monotonic),
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
    model = read_model(config)
    if model is not None:
        try:
            cache.adopt_model(model)
        except SlotcarError as error:
            raise StartError(error.message) from error
        _log.info("model", extra={"fields": {"sites": len(model.sites), "slot_bytes": device.slot_bytes()}})
    metrics.build(
        version=version("slotcar"),
        epoch=str(layout.epoch),
        device="cpu",
        slot_dtype=config.dtype,
        kernel=device.kernel,
    )
    metrics.watch(functools.partial(_read_snapshot, asyncio.get_running_loop(), cache))
    return cache


def read_model(config: Config) -> ModelSpec | None:
    """The model that the settings name, or None. Raises StartError."""
    try:
        if config.base_model is not None:
            return model_spec_from_folder(config.base_model)
        if config.model_spec is not None:
            return model_spec_from_file(config.model_spec)
    except (SlotcarError, OSError) as error:
        raise StartError(str(error)) from error
    return None


def _read_snapshot(loop: asyncio.AbstractEventLoop, cache: AdapterCache) -> Snapshot:
    """The cache's owner is one thread; scrapes come in others."""
    return asyncio.run_coroutine_threadsafe(_snapshot(cache), loop).result(_SNAPSHOT_SECONDS)


async def _snapshot(cache: AdapterCache) -> Snapshot:
    residency = cache.residency
    pins = sum(len(owners) for owners in residency.pins.owners.values())
    return Snapshot(residency.layout, cache.capacity(), pins, len(residency.holds))


async def _expire(cache: AdapterCache) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_SECONDS)
        cache.expire()


async def _shut_down(rpc: Rpc, cache: AdapterCache, seconds: float) -> None:
    """Takes no new sessions or loads, serves until no Forward has come for a moment or the time is over, and closes."""
    _log.info("shutting down", extra={"fields": {"sessions": len(cache.sessions), "deadline_seconds": seconds}})
    await _set_health(rpc.health, serving=False)
    cache.shut_down()
    start = time.monotonic()
    deadline = start + seconds
    while len(cache.sessions) and (now := time.monotonic()) < deadline:
        if not cache.forwards_in_flight and now - max(cache.last_forward_at, start) > _QUIET_SECONDS:
            break
        await asyncio.sleep(_QUIET_SECONDS / 10)
    cache.close()
    await rpc.server.stop(_CLOSE_SECONDS)
    _log.info("stopped")


async def _end_tasks() -> None:
    """Lets what still runs come to its end: gRPC logs as a fault what the loop would cancel."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)


async def _set_health(servicer: Health, *, serving: bool) -> None:
    """Liveness says that the process runs; readiness, and the server as a whole, that it takes new sessions."""
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    await servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    for service in ("readiness", ""):
        await servicer.set(service, status)


def _serve_metrics(address: TcpAddress, metrics: Metrics, resources: contextlib.ExitStack) -> None:
    try:
        server, _ = start_http_server(address.port, address.host, metrics.registry)
    except OSError as error:
        raise StartError(f"cannot serve metrics at {address.authority}: {error}") from error
    resources.callback(server.server_close)
    resources.callback(server.shutdown)
    port = server.server_address[1]
    _log.info("metrics", extra={"fields": {"at": f"http://{TcpAddress(address.host, port).authority}/metrics"}})


def _bind(server: aio.Server, address: Address) -> Address:
    """Binds, and returns the address with the port that was given. A unix socket gets mode 0660."""
    try:
        if isinstance(address, TcpAddress):
            port = address.port
            for host in _resolved(address.host):
                port = server.add_insecure_port(TcpAddress(host, port).authority)
            return TcpAddress(address.host, port)
        umask = os.umask(0o117)
        try:
            server.add_insecure_port(f"unix:{quote(str(address.path))}")
        finally:
            os.umask(umask)
        return address
    except (RuntimeError, OSError) as error:
        raise StartError(f"cannot listen at {address}: {error}") from error


def _resolved(host: str) -> list[str]:
    """The addresses of a name that this machine has.

    gRPC would be content with any one of them, though another server has the rest.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, str(address[0])) for family, *_, address in found)
    usable = [address for family, address in addresses if _is_here(family, address)]
    if not usable:
        raise StartError(f"this machine has no address of {host}")
    return usable


def _is_here(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Owns the socket path while the context is open; gRPC itself would take a live server's path in silence.

    The lock file beside the socket stays, so that two servers can never lock two files of one name.
    """
    if not path.parent.is_dir():
        raise StartError(f"cannot listen at {path}: the folder {path.parent} does not exist")
    try:
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartError(f"cannot lock {path}.lock: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another slotcar serves {path}") from None
        _remove_dead_socket(path)
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _remove_dead_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            _log.info("took over the socket of a dead server", extra={"fields": {"path": path}})
            return
        except OSError as error:
            raise StartError(f"cannot tell whether {path} is alive: {error.strerror}") from error
    raise StartError(f"another server listens at {path}")


def _keep_freed_memory() -> None:
    """Tells glibc to reuse large buffers instead of returning them: messages of megabytes get several times cheaper.

    One arena, or each thread keeps holes of its own between its buffers.
    """
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_arena_max, 1)
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


async def _return_freed_memory() -> None:
    """Returns what is free now and then, as glibc itself does not any more; otherwise holes between buffers add up."""
    with contextlib.suppress(OSError, AttributeError):
        trim = ctypes.CDLL("libc.so.6").malloc_trim
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            await asyncio.to_thread(trim, 0)
