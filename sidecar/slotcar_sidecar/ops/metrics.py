"""All Prometheus metrics of slotcar: their names, help and units, and where their values come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from slotcar_sidecar.core.desired import EntryState
from slotcar_sidecar.core.errors import Reason
from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.tally import BOUNDS_SECONDS, ForwardTally

_DISK_RESULTS = {
    "read": ("hit", "miss", "damaged", "failed"),
    "write": ("written", "present", "skipped", "full", "failed"),
    "remove": ("forgotten", "evicted", "damaged", "elsewhere"),
}
_LOAD_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SETTLE_BUCKETS = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


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
        self._waits = prometheus_client.Counter(
            "slotcar_forward_load_waits", "Forwards that waited for a load: none, unless slotcar has a fault.",
            registry=registry,
        )  # fmt: skip
        self._disk = prometheus_client.Counter(
            "slotcar_disk_operations", "What the disk tier was asked for, and what went from it, by how that ended.",
            ["operation", "result"], registry=registry,
        )  # fmt: skip
        self._fetched = prometheus_client.Counter(
            "slotcar_fetched_bytes", "Bytes that came from remote sources.", ["scheme"], registry=registry
        )
        self._fetch_retries = prometheus_client.Counter(
            "slotcar_fetch_retries", "Requests to remote sources that were tried again, by what went wrong.",
            ["scheme", "reason"], registry=registry,
        )  # fmt: skip
        self._fetch_failures = prometheus_client.Counter(
            "slotcar_fetch_failures", "Looks and reads of remote sources that failed, by why.",
            ["scheme", "reason"], registry=registry,
        )  # fmt: skip
        self._journal = prometheus_client.Counter(
            "slotcar_journal_writes", "Writes of the journal.", ["result"], registry=registry
        )
        self._desired_entries = prometheus_client.Gauge(
            "slotcar_desired_entries", "Entries of the declared set, by state.", ["state"], registry=registry
        )
        self._desired_in_force = prometheus_client.Gauge(
            "slotcar_desired_in_force", "1 when what is in the file of --adapters now is in force.", registry=registry
        )
        self._desired_failures = prometheus_client.Counter(
            "slotcar_desired_failures", "New failures of entries of the declared set, and of its file, by reason.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self._desired_seconds = prometheus_client.Histogram(
            "slotcar_desired_settle_seconds", "Time from a new declared set until each entry of it was tried.",
            buckets=_SETTLE_BUCKETS, registry=registry,
        )  # fmt: skip
        self._show_zeros()

    def _show_zeros(self) -> None:
        """What has not happened yet has a sample, so that its rate is right from the first time on."""
        self.desired_entries({})
        for reason in Reason:
            self._desired_failures.labels(reason.value)
        for operation, results in _DISK_RESULTS.items():
            for result in results:
                self._disk.labels(operation, result)
        for result in ("written", "failed"):
            self._journal.labels(result)
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

    def disk(self, operation: str, result: str) -> None:
        self._disk.labels(operation, result).inc()

    def fetched(self, scheme: str, count: int) -> None:
        self._fetched.labels(scheme).inc(count)

    def fetch_retried(self, scheme: str, reason: str) -> None:
        self._fetch_retries.labels(scheme, reason).inc()

    def fetch_failed(self, scheme: str, reason: str) -> None:
        self._fetch_failures.labels(scheme, reason).inc()

    def journal(self, result: str) -> None:
        self._journal.labels(result).inc()

    def forward(self, plane: str, rows: int, seconds: float, reason: str) -> None:
        self._forwards.of(plane).add(rows, seconds, reason)

    def forward_waited(self) -> None:
        self._waits.inc()

    def desired_entries(self, counts: Mapping[EntryState, int]) -> None:
        for state in EntryState:
            self._desired_entries.labels(state.value).set(counts.get(state, 0))

    def desired_failed(self, reason: str) -> None:
        self._desired_failures.labels(reason).inc()

    def desired_settled(self, seconds: float) -> None:
        self._desired_seconds.observe(seconds)

    def desired_file(self, *, in_force: bool) -> None:
        self._desired_in_force.set(in_force)

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
        tiers = {"host": now.capacity.host, "disk": now.capacity.disk}
        for name, text, values in (
            ("used", "Bytes of adapters in a tier.", {tier: use.used_bytes for tier, use in tiers.items()}),
            ("capacity", "Bytes that a tier may hold.", {tier: use.capacity_bytes for tier, use in tiers.items()}),
            ("held", "Bytes that a tier may not drop.", {tier: use.held_bytes for tier, use in tiers.items()}),
        ):
            family = GaugeMetricFamily(f"slotcar_tier_{name}_bytes", text, labels=["tier"])
            for tier, value in values.items():
                family.add_metric([tier], value)
            yield family
        names = GaugeMetricFamily("slotcar_journal_names", "Names of the journal that are not back.", labels=["state"])
        names.add_metric(["waiting"], now.capacity.restoring)
        names.add_metric(["failed"], len(now.capacity.restore_failures))
        yield names
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
