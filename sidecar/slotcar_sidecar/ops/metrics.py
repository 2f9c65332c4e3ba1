"""Counts what happens, as core.ports.Observer and its like in sync and store, and shows it with what is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, product

import prometheus_client
from prometheus_client.core import CollectorRegistry, CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from slotcar_sidecar.core.desired import EntryState
from slotcar_sidecar.core.errors import Reason
from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.tally import BOUNDS_SECONDS, ForwardTally, Work
from slotcar_sidecar.ops.catalogue import BY_NAME
from slotcar_sidecar.ops.gauges import Gauges, Naming, Snapshot
from slotcar_sidecar.ops.spans import Spans

_PLANES = ("unary", "stream", "ring", "direct")
_DISK_RESULTS = {
    "read": ("hit", "miss", "damaged", "failed"),
    "write": ("written", "present", "skipped", "full", "failed"),
    "remove": ("forgotten", "evicted", "damaged", "elsewhere"),
}
_EVICTIONS = {"device": ("load", "mapping", "prefetch"), "host": ("capacity",), "disk": ("capacity",)}
# What alerts watch, and the calls that are refused when slots are short.
_SLOT_CALLS = ("LoadAdapter", "SetMapping", "HoldAdapter", "KeepAdapter", "OpenSession")
_NO_FORWARDS = {"OK": 0, Reason.LAYOUT_STALE.value: 0, Reason.INTERNAL.value: 0}


class Metrics:
    """Called on the owner's thread; never raises."""

    def __init__(self, spans: Spans | None = None) -> None:
        """`spans` is told what ended, and says which trace it belongs to; None where nothing is traced."""
        self._spans = spans
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.facts: Mapping[str, str] = {}
        self.stage_listeners: list[Callable[[str, float, Digest], None]] = []
        self._build = prometheus_client.Info("slotcar_build", BY_NAME["slotcar_build"].text, registry=self.registry)
        self._rpcs = self._counter("slotcar_rpcs")
        self._events = self._counter("slotcar_events")
        self._forwards = _Forwards()
        self.registry.register(self._forwards)
        self._waits = self._counter("slotcar_forward_load_waits")
        self._loads = self._counter("slotcar_loads")
        self._load_seconds = self._histogram("slotcar_load_stage_seconds")
        self._lookups = self._counter("slotcar_tier_lookups")
        self._evictions = self._counter("slotcar_evictions")
        self._thrash = self._counter("slotcar_thrash")
        self._recoveries = self._counter("slotcar_recoveries")
        self._mapping_seconds = self._histogram("slotcar_mapping_wait_seconds")
        self._disk = self._counter("slotcar_disk_operations")
        self._fetched = self._counter("slotcar_fetched_bytes")
        self._fetch_retries = self._counter("slotcar_fetch_retries")
        self._fetch_failures = self._counter("slotcar_fetch_failures")
        self._journal = self._counter("slotcar_journal_writes")
        self._log_dropped = self._counter("slotcar_log_lines_dropped")
        self._audit_failures = self._counter("slotcar_audit_failures")
        self._desired_entries = self._gauge("slotcar_desired_entries")
        self._desired_in_force = self._gauge("slotcar_desired_in_force")
        self._desired_failures = self._counter("slotcar_desired_failures")
        self._desired_seconds = self._histogram("slotcar_desired_settle_seconds")
        self._reloads = self._counter("slotcar_reloads")
        self._reload_failing = self._gauge("slotcar_reload_failing")
        self._certificates = self._gauge("slotcar_certificate_expiry_timestamp_seconds")
        self._show_zeros()

    def _counter(self, name: str) -> prometheus_client.Counter:
        one = BY_NAME[name]
        return prometheus_client.Counter(name, one.text, one.labels, unit=one.unit, registry=self.registry)

    def _gauge(self, name: str) -> prometheus_client.Gauge:
        one = BY_NAME[name]
        return prometheus_client.Gauge(name, one.text, one.labels, unit=one.unit, registry=self.registry)

    def _histogram(self, name: str) -> prometheus_client.Histogram:
        one, registry = BY_NAME[name], self.registry
        return prometheus_client.Histogram(
            name, one.text, one.labels, unit=one.unit, buckets=one.buckets, registry=registry
        )

    def _show_zeros(self) -> None:
        """What has not happened yet has a sample, so that its rate is right from the first time on."""
        self.desired_entries({})
        self.desired_file(in_force=True)
        for plane in _PLANES:
            self._forwards.of(plane)
        zeros: dict[prometheus_client.Counter, Iterable[tuple[str, ...]]] = {
            self._loads: ((reason,) for reason in ("OK", *Reason)),
            self._desired_failures: ((reason,) for reason in Reason),
            self._rpcs: product(_SLOT_CALLS, (Reason.SLOTS_EXHAUSTED, Reason.INTERNAL)),
            self._events: ((kind,) for kind in EventKind),
            self._journal: (("written",), ("failed",)),
            self._disk: _pairs(_DISK_RESULTS),
            self._evictions: _pairs(_EVICTIONS),
            self._lookups: product(_EVICTIONS, ("hit", "miss")),
        }
        for family, all_labels in zeros.items():
            for labels in all_labels:
                family.labels(*map(str, labels))

    def watch(self, snapshot: Callable[[], Snapshot], naming: Naming) -> None:
        """Shows what `snapshot` returns, from now on."""
        self.registry.register(Gauges(snapshot, naming))

    def build(self, **facts: str) -> None:
        self.facts = facts
        self._build.info(facts)

    def rpc(self, method: str, reason: str) -> None:
        self._rpcs.labels(method, reason).inc()

    def certificate(self, kind: str, expires: float) -> None:
        self._certificates.labels(kind).set(expires)

    def event(self, event: Event) -> None:
        self._events.labels(event.kind.value).inc()

    def log_lost(self, lines: int) -> None:
        """In any thread."""
        self._log_dropped.inc(lines)

    def audit_lost(self, lines: int) -> None:
        """In any thread."""
        self._audit_failures.inc(lines)

    # Loads

    def loaded(self, reason: str) -> None:
        self._loads.labels(reason).inc()

    def load_stage(self, stage: str, seconds: float, digest: Digest) -> None:
        trace = self._spans.load_stage(stage, seconds, digest) if self._spans else None
        self._load_seconds.labels(stage).observe(seconds, trace)
        for listener in self.stage_listeners:
            listener(stage, seconds, digest)

    def looked_up(self, tier: str, hits: int, misses: int) -> None:
        self._lookups.labels(tier, "hit").inc(hits)
        self._lookups.labels(tier, "miss").inc(misses)

    def evicted(self, tier: str, reason: str) -> None:
        self._evictions.labels(tier, reason).inc()

    def thrashed(self) -> None:
        self._thrash.inc()

    def disk(self, operation: str, result: str) -> None:
        self._disk.labels(operation, result).inc()
        if (operation, result) == ("remove", "evicted"):
            self.evicted("disk", "capacity")

    def fetched(self, scheme: str, count: int) -> None:
        self._fetched.labels(scheme).inc(count)

    def fetch_retried(self, scheme: str, reason: str) -> None:
        self._fetch_retries.labels(scheme, reason).inc()

    def fetch_failed(self, scheme: str, reason: str) -> None:
        self._fetch_failures.labels(scheme, reason).inc()

    def journal(self, result: str) -> None:
        self._journal.labels(result).inc()

    # Sessions and Forwards

    def recovered(self) -> None:
        self._recoveries.inc()

    def mapping_waited(self, seconds: float) -> None:
        trace = self._spans.mapping_waited(seconds) if self._spans else None
        self._mapping_seconds.observe(seconds, trace)

    def forward(self, plane: str, seconds: float, reason: str, work: Work, queue_seconds: float) -> None:
        self._forwards.of(plane).add(seconds, reason, work, queue_seconds)
        if self._spans and (trace := self._spans.forward(plane, seconds, reason, work, queue_seconds)):
            self._forwards.note(plane, seconds, trace)

    def forward_waited(self) -> None:
        self._waits.inc()

    def begin_tally(self, plane: str) -> ForwardTally:
        return self._forwards.begin(plane)

    def end_tally(self, plane: str, tally: ForwardTally) -> None:
        self._forwards.end(plane, tally)

    # The declared set

    def desired_entries(self, counts: Mapping[EntryState, int]) -> None:
        for state in EntryState:
            self._desired_entries.labels(state.value).set(counts.get(state, 0))

    def desired_failed(self, reason: str) -> None:
        self._desired_failures.labels(reason).inc()

    def desired_settled(self, seconds: float) -> None:
        self._desired_seconds.observe(seconds)

    def desired_file(self, *, in_force: bool) -> None:
        self._desired_in_force.set(in_force)

    # Reloads

    def reloads(self, what: str) -> None:
        self._reload_failing.labels(what).set(0)
        for result in ("applied", "failed"):
            self._reloads.labels(what, result)

    def reloaded(self, what: str, *, in_force: bool) -> None:
        self._reloads.labels(what, "applied" if in_force else "failed").inc()
        self._reload_failing.labels(what).set(not in_force)


def _pairs(table: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    return ((key, value) for key, values in table.items() for value in values)


class _Forwards(Collector):
    """Forwards by plane: what the owner counted or took over, and what threads are counting."""

    def __init__(self) -> None:
        self._own: dict[str, ForwardTally] = {}
        self._exemplars: dict[tuple[str, int], Exemplar] = {}
        self._begun: dict[ForwardTally, str] = {}

    def of(self, plane: str) -> ForwardTally:
        """The owner's own counts."""
        return self._own.get(plane) or self._own.setdefault(plane, ForwardTally())

    def note(self, plane: str, seconds: float, trace: dict[str, str]) -> None:
        """A Forward's time belongs to a trace; the newest of a bucket is shown with it."""
        self._exemplars[plane, bisect_left(BOUNDS_SECONDS, seconds)] = Exemplar(trace, seconds)

    def begin(self, plane: str) -> ForwardTally:
        self.of(plane)
        tally = ForwardTally()
        self._begun[tally] = plane
        return tally

    def end(self, plane: str, tally: ForwardTally) -> None:
        if self._begun.pop(tally, None):
            self.of(plane).include(tally)

    def collect(self) -> Iterator[Metric]:
        totals = {plane: self._total(plane) for plane in tuple(self._own)}
        ended, rows = _counts("slotcar_forwards"), _counts("slotcar_forward_rows")
        moved, queued = _counts("slotcar_forward_bytes"), _counts("slotcar_forward_queue_seconds")
        one = BY_NAME["slotcar_forward_seconds"]
        seconds = HistogramMetricFamily(one.name, one.text, labels=one.labels, unit=one.unit)
        bounds = (*map(str, BOUNDS_SECONDS), "+Inf")
        for plane, total in totals.items():
            for reason, count in (_NO_FORWARDS | total.reasons).items():
                ended.add_metric([plane, reason], count)
            rows.add_metric([plane], total.rows)
            counted = enumerate(zip(bounds, accumulate(total.buckets), strict=True))
            buckets = [(*each, found) if (found := self._exemplars.get((plane, i))) else each for i, each in counted]
            seconds.add_metric([plane], buckets, total.seconds)
            queued.add_metric([plane], total.queue_seconds)
            moved.add_metric([plane, "in"], total.in_bytes)
            moved.add_metric([plane, "out"], total.out_bytes)
        yield from (ended, rows, moved, seconds, queued)

    def _total(self, plane: str) -> ForwardTally:
        total = ForwardTally()
        total.include(self._own[plane])
        for tally, name in tuple(self._begun.items()):
            if name == plane:
                total.include(tally)
        return total


def _counts(name: str) -> CounterMetricFamily:
    one = BY_NAME[name]
    return CounterMetricFamily(name, one.text, labels=one.labels, unit=one.unit)
