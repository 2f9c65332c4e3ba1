"""What a scrape shows of the cache: one snapshot of one moment, however many adapters there are."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.config import Config
from slotcar_sidecar.core.pins import MappingOwner
from slotcar_sidecar.ops.gauges import Naming, ResidentName, Snapshot
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.process.owner import Owner

__all__ = ["take_snapshot", "watch"]


def watch(metrics: Metrics, cache: AdapterCache, config: Config, owner: Owner) -> None:
    """Shows the cache's state in the metrics, as its owner says at each scrape."""

    def read() -> Snapshot:
        return owner.ask(lambda: take_snapshot(cache, config.metrics_adapters, time.time()))

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
