"""Every metric that slotcar exports, as one table: what it is called, what it says, its labels and its unit.

Metrics are made from this table, and so are docs/metrics.md and tests/golden/metrics.txt. A label's values come from a
closed set, but for those of `ADAPTER_METRICS`, whose series are as many as --metrics-adapters allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slotcar_sidecar.core.tally import BOUNDS_SECONDS


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


_SUFFIXES = {Kind.COUNTER: ("_total",), Kind.INFO: ("_info",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}


@dataclass(frozen=True, slots=True)
class Described:
    """A metric. `name` is without the suffix that its kind gives to samples; `buckets` are bounds in `unit`."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def shown_name(self) -> str:
        """As queries and people know it: a histogram by the name that its samples have in common."""
        return self.name if self.kind is Kind.HISTOGRAM else self.sample_names[0]

    @property
    def sample_names(self) -> tuple[str, ...]:
        return tuple(self.name + suffix for suffix in _SUFFIXES.get(self.kind, ("",)))


def _counter(name: str, text: str, *labels: str, unit: str = "") -> Described:
    return Described(name, Kind.COUNTER, text, labels, unit)


def _gauge(name: str, text: str, *labels: str, unit: str = "") -> Described:
    return Described(name, Kind.GAUGE, text, labels, unit)


def _seconds(name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Described:
    return Described(name, Kind.HISTOGRAM, text, labels, "seconds", buckets)


LORA_INFO = "slotcar_lora_requests_info"
ADAPTER_METRICS = ("slotcar_adapter_pins", "slotcar_adapter_bytes", LORA_INFO)

_LOAD_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_WAIT_BUCKETS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
_SETTLE_BUCKETS = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

CATALOGUE = (
    # The server and its slots
    Described(
        "slotcar_build",
        Kind.INFO,
        "This server: its version, the epoch of this life of it, its device, the kernel and the dtype of the slots.",
        ("version", "epoch", "device", "kernel", "slot_dtype"),
    ),
    _gauge("slotcar_layout_generation", "Generation of the current layout; it counts from 1 in each epoch."),
    _gauge("slotcar_slots", "Slots by state: free, filling, occupied, draining.", "state"),
    _gauge("slotcar_slots_reserved", "Slots that sessions reserved."),
    # Adapters and tiers
    _gauge("slotcar_adapters", "Names that have an adapter."),
    _gauge("slotcar_adapters_kept", "Names that an operator keeps resident."),
    _gauge("slotcar_tier_adapters", "Adapters in a tier: device, host, disk.", "tier"),
    _gauge("slotcar_tier_used_bytes", "Bytes of a tier that are in use.", "tier", unit="bytes"),
    _gauge("slotcar_tier_capacity_bytes", "Bytes that a tier may have.", "tier", unit="bytes"),
    _gauge(
        "slotcar_tier_held_bytes",
        "Bytes that may not leave a tier: pinned on the device, else held or nowhere else.",
        "tier",
        unit="bytes",
    ),
    _counter(
        "slotcar_tier_lookups",
        "Adapters that were looked for in a tier, by hit or miss: on the device by each mapping and load.",
        *("tier", "result"),
    ),
    _counter(
        "slotcar_evictions",
        "Adapters that left a tier for others: a slot for a load, mapping or prefetch, memory and disk for capacity.",
        *("tier", "reason"),
    ),
    _counter("slotcar_thrash", "Adapters that came back into a slot within a minute of their eviction from one."),
    _counter(
        "slotcar_loads", "Loads that ended, by OK or error reason; mappings, holds and prefetches load too.", "reason"
    ),
    _seconds(
        "slotcar_load_stage_seconds",
        "Time of a load by stage: read, wait for readers of the slot, fill.",
        "stage",
        buckets=_LOAD_BUCKETS,
    ),
    _gauge(
        "slotcar_adapter_pins",
        "Pins of each resident adapter, by its name; the latest used, at most --metrics-adapters of them.",
        *("adapter", "digest", "slot"),
    ),
    _gauge(
        "slotcar_adapter_bytes",
        "Size of each resident adapter, by its name; as many as slotcar_adapter_pins.",
        *("adapter", "digest"),
        unit="bytes",
    ),
    _gauge(
        LORA_INFO,
        "For routers: names that are resident, and those that wait for a slot; the value is the time of both in Unix "
        "seconds. Called what --metrics-lora-info says.",
        *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    # Sessions
    _gauge("slotcar_sessions", "Live sessions, attached or in their grace."),
    _gauge("slotcar_mappings", "Mappings of all sessions."),
    _gauge("slotcar_mappings_waiting", "SetMapping calls that wait for slots."),
    _seconds(
        "slotcar_mapping_wait_seconds",
        "Time that a SetMapping which had to wait for slots waited, served or not.",
        buckets=_WAIT_BUCKETS,
    ),
    _counter(
        "slotcar_recoveries",
        "Stale mappings that their sessions set again by the digests of before, as clients do by themselves.",
    ),
    _gauge("slotcar_pins", "Pairs of an owner and a slot that it pins, by kind of owner: mapping, hold.", "owner"),
    _gauge("slotcar_holds", "Holds of all sessions."),
    # Forwards
    _counter("slotcar_forwards", "Forwards that ended, by data plane and by OK or error reason.", "plane", "reason"),
    _counter("slotcar_forward_rows", "Rows of Forwards that were computed.", "plane"),
    _counter(
        "slotcar_forward_bytes",
        "Bytes of the tensors of Forwards that were computed: in and out. Not known of the direct plane.",
        *("plane", "direction"),
        unit="bytes",
    ),
    _seconds(
        "slotcar_forward_seconds",
        "Time of a Forward in the server; none on the direct plane.",
        "plane",
        buckets=BOUNDS_SECONDS,
    ),
    _counter(
        "slotcar_forward_queue_seconds",
        "The part of slotcar_forward_seconds before the kernels start.",
        "plane",
        unit="seconds",
    ),
    _counter("slotcar_forward_load_waits", "Forwards that waited for a load: none, unless slotcar has a fault."),
    # Calls and events
    _counter(
        "slotcar_rpcs",
        "Calls that ended, by method and by OK or error reason; PlaneHello is a ring's hand-shake.",
        *("method", "reason"),
    ),
    _counter("slotcar_events", "Things that happened to adapters, slots and sessions.", "kind"),
    _counter("slotcar_log_lines_dropped", "Lines of the log that nobody took in time, or that could not be written."),
    _counter("slotcar_audit_failures", "Lines of the file of --audit-log that could not be written."),
    # The disk tier, the journal and remote sources
    _counter(
        "slotcar_disk_operations",
        "What the disk tier was asked to read and write, and what went from it (remove), by how that ended.",
        *("operation", "result"),
    ),
    _counter("slotcar_journal_writes", "Writes of the journal: written, failed.", "result"),
    _gauge("slotcar_journal_names", "Names of the journal that are not back: waiting, failed.", "state"),
    _counter("slotcar_fetched_bytes", "Bytes that came from remote sources.", "scheme", unit="bytes"),
    _counter(
        "slotcar_fetch_retries",
        "Requests to remote sources that were tried again, by what went wrong.",
        *("scheme", "reason"),
    ),
    _counter("slotcar_fetch_failures", "Looks at and reads of remote sources that failed, by why.", "scheme", "reason"),
    # The declared set
    _gauge(
        "slotcar_desired_entries",
        "Entries of the declared set by state: pending, loading, ready, absent, failed, invalid.",
        "state",
    ),
    _gauge("slotcar_desired_in_force", "0 while what is in the file of --adapters is not in force, else 1."),
    _counter(
        "slotcar_desired_failures",
        "New failures of entries of the declared set, and of its file, by reason; the same one again is not counted.",
        "reason",
    ),
    _seconds(
        "slotcar_desired_settle_seconds",
        "Time from a new declared set until each entry of it was tried.",
        buckets=_SETTLE_BUCKETS,
    ),
    # Certificates, and files that are put in force while the server runs
    _gauge(
        "slotcar_certificate_expiry_timestamp_seconds",
        "End of the life of certificates in force, in Unix seconds: of the server's, and the first of those that check "
        "clients'.",
        "certificate",
        unit="seconds",
    ),
    _counter(
        "slotcar_reloads",
        "Files that were to be put in force anew, by what they are and by result: applied, failed.",
        *("what", "result"),
    ),
    _gauge("slotcar_reload_failing", "1 while what the files say is not in force, as it cannot be, else 0.", "what"),
)

BY_NAME = {each.name: each for each in CATALOGUE}
