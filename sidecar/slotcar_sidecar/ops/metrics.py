"""All Prometheus metrics of slotcar: their names, help and units, and where their values come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import prometheus_client
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from slotcar_sidecar.core.calls import Capacity
from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.tally import BOUNDS_SECONDS, ForwardTally

_LOAD_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the gauges show; `capacity` at the same moment as `layout`."""

    layout: Layout
    capacity: Capacity
    pins: int
    holds: int


class Metrics:
    """Counts what happens (core.ports.Observer) and shows what is (a Snapshot per scrape)."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        registry = self.registry
        self._build = prometheus_client.Info("slotcar_build", "Version and set-up of this server.", registry=registry)
        self._rpcs = prometheus_client.Counter(
            "slotcar_rpcs", "Calls that ended, by method and by OK or error reason.", ["method", "reason"],
            registry=registry,
        )  # fmt: skip
        self._events = prometheus_client.Counter(
            "slotcar_events", "Things that happened to adapters, slots and sessions.", ["kind"], registry=registry
        )
        self._forwards = _Forwards()
        registry.register(self._forwards)
        self._load_seconds = prometheus_client.Histogram(
            "slotcar_load_stage_seconds", "Time of a load by stage: read, wait for readers of the slot, fill.",
            ["stage"], buckets=_LOAD_BUCKETS, registry=registry,
        )  # fmt: skip
        self._host_lookups = prometheus_client.Counter(
            "slotcar_host_lookups", "Loads that looked for their bytes in the host tier.", ["result"],
            registry=registry,
        )  # fmt: skip
        for kind in EventKind:
            self._events.labels(kind.value)
        for result in ("hit", "miss"):
            self._host_lookups.labels(result)

    def watch(self, snapshot: Callable[[], Snapshot]) -> None:
        """Shows what `snapshot` returns, from now on."""
        self.registry.register(_Gauges(snapshot))

    def build(self, **facts: str) -> None:
        self._build.info(facts)

    def rpc(self, method: str, reason: str) -> None:
        self._rpcs.labels(method, reason).inc()

    def event(self, event: Event) -> None:
        self._events.labels(event.kind.value).inc()

    def load_stage(self, stage: str, seconds: float) -> None:
        self._load_seconds.labels(stage).observe(seconds)

    def host_lookup(self, *, hit: bool) -> None:
        self._host_lookups.labels("hit" if hit else "miss").inc()

    def forward(self, plane: str, rows: int, seconds: float, reason: str) -> None:
        self._forwards.of(plane).add(rows, seconds, reason)

    def begin_tally(self, plane: str) -> ForwardTally:
        return self._forwards.begin(plane)

    def end_tally(self, plane: str, tally: ForwardTally) -> None:
        self._forwards.end(plane, tally)


class _Forwards(Collector):
    """Forwards by plane: what the owner counted or took over, and what threads are counting."""

    def __init__(self) -> None:
        self._own: dict[str, ForwardTally] = {}
        self._begun: dict[ForwardTally, str] = {}

    def of(self, plane: str) -> ForwardTally:
        """The owner's own counts."""
        return self._own.get(plane) or self._own.setdefault(plane, ForwardTally())

    def begin(self, plane: str) -> ForwardTally:
        self.of(plane)
        tally = ForwardTally()
        self._begun[tally] = plane
        return tally

    def end(self, plane: str, tally: ForwardTally) -> None:
        if self._begun.pop(tally, None):
            self.of(plane).include(tally)

    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "slotcar_forwards", "Forwards that ended, by data plane and by OK or error reason.",
            labels=["plane", "reason"],
        )  # fmt: skip
        rows = CounterMetricFamily("slotcar_forward_rows", "Rows of Forwards that were computed.", labels=["plane"])
        seconds = HistogramMetricFamily(
            "slotcar_forward_seconds", "Time of a Forward in the server.", labels=["plane"]
        )  # fmt: skip
        for plane, own in tuple(self._own.items()):
            total = ForwardTally()
            for tally in (own, *(tally for tally, name in tuple(self._begun.items()) if name == plane)):
                total.include(tally)
            for reason, count in total.reasons.items():
                ended.add_metric([plane, reason], count)
            rows.add_metric([plane], total.rows)
            bounds = (*map(str, BOUNDS_SECONDS), "+Inf")
            seconds.add_metric([plane], list(zip(bounds, accumulate(total.buckets), strict=True)), total.seconds)
        yield from (ended, rows, seconds)


class _Gauges(Collector):
    """Reads one snapshot per scrape, so that its values are of one moment."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._snapshot()
        slots = GaugeMetricFamily("slotcar_slots", "Slots by state.", labels=["state"])
        for state in SlotState:
            slots.add_metric([state.value], len(now.layout.in_state(state)))
        yield slots
        used = GaugeMetricFamily("slotcar_tier_used_bytes", "Bytes of adapters in a tier.", labels=["tier"])
        used.add_metric(["host"], now.capacity.host.used_bytes)
        yield used
        capacity = GaugeMetricFamily("slotcar_tier_capacity_bytes", "Bytes that a tier may hold.", labels=["tier"])
        capacity.add_metric(["host"], now.capacity.host.capacity_bytes)
        yield capacity
        held = GaugeMetricFamily("slotcar_tier_held_bytes", "Bytes that a tier may not drop.", labels=["tier"])
        held.add_metric(["host"], now.capacity.host.held_bytes)
        yield held
        for name, text, value in (
            ("slotcar_layout_generation", "Generation of the current layout.", now.layout.generation),
            ("slotcar_adapters", "Names that have an adapter.", now.capacity.adapters[0]),
            ("slotcar_adapters_kept", "Names that an operator keeps resident.", now.capacity.keeps),
            ("slotcar_pins", "Pairs of a mapping or hold and a slot that it pins.", now.pins),
            ("slotcar_holds", "Holds of all sessions.", now.holds),
            ("slotcar_slots_reserved", "Slots that sessions reserved.", now.capacity.reserved),
            ("slotcar_mappings_waiting", "SetMapping calls that wait for slots.", now.capacity.waiting),
            ("slotcar_sessions", "Live sessions, attached or in their grace.", now.capacity.sessions[0]),
        ):
            yield GaugeMetricFamily(name, text, value=value)
