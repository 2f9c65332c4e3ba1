"""Makes the cache that the settings ask for, with its tiers and pools, and gives it back what its journal knows."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from slotcar.shm.slots import EPOCH_BYTES

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import Config
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.core.events import EventKind, EventLog
from slotcar_sidecar.core.ids import Epoch
from slotcar_sidecar.core.journal import JournalDamaged
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.policy import Eviction
from slotcar_sidecar.core.ports import DiskTier, Environment, Limits
from slotcar_sidecar.core.residency import Residency
from slotcar_sidecar.core.session import Sessions
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.device.threads import compute_alone
from slotcar_sidecar.ops import audit, logs
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.process import devices
from slotcar_sidecar.process.fetches import make_sources
from slotcar_sidecar.process.sockets import StartError
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.disk.folder import DiskFolder
from slotcar_sidecar.store.disk.places import NotOurs
from slotcar_sidecar.store.disk.tier import DiskTierLru, NoDisk, Threads
from slotcar_sidecar.store.host import HostTierLru
from slotcar_sidecar.store.journal import JournalFile, JournalInUse
from slotcar_sidecar.store.model import model_spec_from_file, model_spec_of
from slotcar_sidecar.store.tiers import StoreTiers

__all__ = ["make_cache", "restore"]

_log = logging.getLogger("slotcar")

_REMOTE_THREADS = 4


async def make_cache(
    config: Config, metrics: Metrics, no_fetches: threading.Event, resources: contextlib.ExitStack
) -> AdapterCache:
    """The cache of the settings, over its device, tiers and pools, which end with `resources`. Raises StartError."""
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
    base = await asyncio.to_thread(_open_base, config)
    source = make_sources(config, base, metrics, no_fetches)
    resources.callback(no_fetches.set)
    layout = Layout.empty(Epoch(secrets.token_hex(EPOCH_BYTES // 2)), config.slots)
    device = devices.make_device(config, str(layout.epoch))
    logs.bind(layout.epoch)
    events.listeners += [logs.log_event, audit.audit_event, metrics.event]
    disk = await _open_disk(config, environment, resources)
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
    model = await asyncio.to_thread(_read_model, config, base)
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
    return cache


async def _open_disk(config: Config, environment: Environment, resources: contextlib.ExitStack) -> DiskTier:
    """The disk tier of the settings; one that cannot be used is none. Raises StartError for what is wrongly set.

    Another server that has the folder may keep its lock for long.
    """
    if config.disk is None:
        return NoDisk()
    try:
        own = secrets.token_hex(8)
        folder = await asyncio.to_thread(DiskFolder.open, config.disk, own, config.disk_bytes, time.time)
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


async def restore(config: Config, cache: AdapterCache, resources: contextlib.ExitStack) -> None:
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
