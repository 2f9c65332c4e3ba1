"""Builds the Grafana dashboard of slotcar: `python deploy/grafana/dashboard.py` rewrites slotcar.json beside it.

The panels are the table PANELS; every expression asks for the instances that the reader chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import VizOrientation
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FILE = Path(__file__).with_name("slotcar.json")
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_HEIGHT = 8


class Kind(StrEnum):
    LINES = "lines"
    NUMBER = "number"
    BARS = "bars"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries` are expressions with their legends; `span` is in columns of 24."""

    row: str
    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Kind = Kind.LINES
    span: int = 8


def _of(metric: str, *labels: str) -> str:
    """A selector of the chosen instances."""
    wanted = ",".join(('instance=~"$instance"', *labels))
    return f"{metric}{{{wanted}}}"


def _rate(metric: str, *labels: str) -> str:
    return f"rate({_of(metric, *labels)}[$__rate_interval])"


def _sum(by: str, expression: str) -> str:
    return f"sum by ({by}) ({expression})"


def _share(by: str, part: str, whole: str) -> str:
    """What part of the whole, where there is a whole."""
    return f"{_sum(by, part)} / ({_sum(by, whole)} > 0)"


def _quantiles(metric: str, by: str, *labels: str) -> tuple[tuple[str, str], ...]:
    rates = f"sum by (le, {by}) ({_rate(metric + '_bucket', *labels)})"
    return tuple((f"histogram_quantile({q}, {rates})", f"{{{{{by}}}}} p{q * 100:g}") for q in (0.5, 0.99))


_LOOKUPS = "slotcar_tier_lookups_total"

PANELS = (
    Panel(
        "Now",
        "Sidecars",
        "Epoch, version and kernel of each; a new epoch is a restart with empty slots.",
        ((_of("slotcar_build_info"), ""),),
        kind=Kind.TABLE,
        span=12,
    ),
    Panel("Now", "Sidecars that answer", "", ((_of("up"), "{{instance}}"),), kind=Kind.NUMBER, span=4),
    Panel(
        "Now",
        "Calls that wait for slots",
        "More than 0 for minutes: too few slots, or mappings that are kept for too long.",
        ((f"sum({_of('slotcar_mappings_waiting')})", "waiting"),),
        kind=Kind.NUMBER,
        span=4,
    ),
    Panel(
        "Now",
        "Epochs begun in an hour",
        "",
        ((f"count by (instance) (last_over_time({_of('slotcar_build_info')}[1h]))", "{{instance}}"),),
        kind=Kind.NUMBER,
        span=4,
    ),
    Panel(
        "Slots and tiers",
        "Slots by state",
        "",
        ((_sum("state", _of("slotcar_slots")), "{{state}}"), (f"sum({_of('slotcar_slots_reserved')})", "reserved")),
    ),
    Panel(
        "Slots and tiers",
        "How full each tier is",
        "Memory and disk are full as a rule: what counts is how much of it may not be dropped.",
        (
            (_share("tier", _of("slotcar_tier_used_bytes"), _of("slotcar_tier_capacity_bytes")), "{{tier}} used"),
            (_share("tier", _of("slotcar_tier_held_bytes"), _of("slotcar_tier_capacity_bytes")), "{{tier}} held"),
        ),
        unit="percentunit",
        kind=Kind.BARS,
    ),
    Panel(
        "Slots and tiers",
        "Adapters by tier",
        "",
        (
            (_sum("tier", _of("slotcar_tier_adapters")), "{{tier}}"),
            (f"sum({_of('slotcar_adapters')})", "names"),
            (f"sum({_of('slotcar_adapters_kept')})", "kept"),
        ),
    ),
    Panel(
        "Slots and tiers",
        "Residents",
        "Every adapter in a slot, who of them is pinned, and how large it is.",
        ((_of("slotcar_adapter_pins"), ""), (_of("slotcar_adapter_bytes"), "")),
        kind=Kind.TABLE,
        span=16,
    ),
    Panel(
        "Slots and tiers",
        "Pins and holds",
        "",
        ((_sum("owner", _of("slotcar_pins")), "pins of {{owner}}s"), (f"sum({_of('slotcar_holds')})", "holds")),
    ),
    Panel(
        "Evictions",
        "Evictions by reason",
        "From a slot for a load, mapping or prefetch; from memory and disk for want of room.",
        ((_sum("tier, reason", _rate("slotcar_evictions_total")), "{{tier}} for {{reason}}"),),
        unit="ops",
    ),
    Panel(
        "Evictions",
        "Thrash",
        "Adapters that came back within a minute of their eviction.",
        ((_sum("instance", _rate("slotcar_thrash_total")), "{{instance}}"),),
        unit="ops",
    ),
    Panel(
        "Evictions",
        "Hits by tier",
        "",
        ((_share("tier", _rate(_LOOKUPS, 'result="hit"'), _rate(_LOOKUPS)), "{{tier}}"),),
        unit="percentunit",
    ),
    Panel(
        "Loads",
        "Loads by end",
        "",
        ((_sum("reason", _rate("slotcar_loads_total")) + " > 0", "{{reason}}"),),
        unit="ops",
    ),
    Panel("Loads", "Time of a load by stage", "", _quantiles("slotcar_load_stage_seconds", "stage"), unit="s"),
    Panel(
        "Loads",
        "Remote sources",
        "Bytes that came, and what failed or was tried again.",
        (
            (_sum("scheme", _rate("slotcar_fetched_bytes_total")), "{{scheme}} bytes/s"),
            (_sum("scheme, reason", _rate("slotcar_fetch_failures_total")), "{{scheme}} failed: {{reason}}"),
            (_sum("scheme, reason", _rate("slotcar_fetch_retries_total")), "{{scheme}} again: {{reason}}"),
        ),
    ),
    Panel(
        "Loads",
        "Disk tier",
        "",
        ((_sum("operation, result", _rate("slotcar_disk_operations_total")) + " > 0", "{{operation}} {{result}}"),),
        unit="ops",
    ),
    Panel(
        "Loads",
        "Declared set",
        "Entries by state; 0 in force: the file of --adapters is refused.",
        (
            (_sum("state", _of("slotcar_desired_entries")), "{{state}}"),
            (f"min({_of('slotcar_desired_in_force')})", "file in force"),
            (_sum("reason", _rate("slotcar_desired_failures_total")) + " > 0", "new failures: {{reason}}"),
        ),
    ),
    Panel(
        "Loads",
        "Time until each entry of a new set was tried",
        "",
        _quantiles("slotcar_desired_settle_seconds", "instance"),
        unit="s",
    ),
    Panel(
        "Loads",
        "Journal",
        "Names that are not back after a restart, and writes that failed.",
        (
            (_sum("state", _of("slotcar_journal_names")), "names {{state}}"),
            (_sum("result", _rate("slotcar_journal_writes_total")), "writes {{result}}"),
        ),
    ),
    Panel(
        "Forwards",
        "Forwards by plane",
        "",
        ((_sum("plane", _rate("slotcar_forwards_total")), "{{plane}}"),),
        unit="ops",
    ),
    Panel(
        "Forwards",
        "Forwards that were refused",
        "LAYOUT_STALE after a forced unload or an eviction is right; INTERNAL is a fault of slotcar.",
        (
            (_sum("reason", _rate("slotcar_forwards_total", 'reason!="OK"')), "{{reason}}"),
            (f"sum({_rate('slotcar_recoveries_total')})", "mapped again by digest"),
            (f"sum({_rate('slotcar_forward_load_waits_total')})", "waited for a load"),
        ),
        unit="ops",
    ),
    Panel("Forwards", "Time of a Forward", "", _quantiles("slotcar_forward_seconds", "plane"), unit="s"),
    Panel(
        "Forwards",
        "Mean time before the kernels start",
        "",
        (
            (
                _share("plane", _rate("slotcar_forward_queue_seconds_total"), _rate("slotcar_forward_seconds_count")),
                "{{plane}}",
            ),
        ),
        unit="s",
    ),
    Panel("Forwards", "Rows", "", ((_sum("plane", _rate("slotcar_forward_rows_total")), "{{plane}}"),), unit="ops"),
    Panel(
        "Forwards",
        "Bytes of tensors",
        "",
        ((_sum("plane, direction", _rate("slotcar_forward_bytes_total")), "{{plane}} {{direction}}"),),
        unit="Bps",
    ),
    Panel(
        "Sessions and calls",
        "Sessions and mappings",
        "",
        ((f"sum({_of('slotcar_sessions')})", "sessions"), (f"sum({_of('slotcar_mappings')})", "mappings")),
    ),
    Panel(
        "Sessions and calls",
        "Time that calls waited for slots",
        "",
        _quantiles("slotcar_mapping_wait_seconds", "instance"),
        unit="s",
    ),
    Panel(
        "Sessions and calls",
        "Calls that were refused",
        "",
        ((_sum("method, reason", _rate("slotcar_rpcs_total", 'reason!="OK"')) + " > 0", "{{method}} {{reason}}"),),
        unit="ops",
    ),
    Panel(
        "Sessions and calls",
        "Life that certificates have left",
        "The server's, and the first of the authorities that check clients'; below 0: expired.",
        (
            (
                f"min by (instance, certificate) ({_of('slotcar_certificate_expiry_timestamp_seconds')}) - time()",
                "{{instance}} {{certificate}}",
            ),
        ),
        unit="s",
    ),
    Panel(
        "Sessions and calls",
        "Reloads",
        "Files that are followed while the server runs; 1 failing: what they say cannot be put in force, and is not.",
        (
            (f"max by (what) ({_of('slotcar_reload_failing')})", "{{what}} failing"),
            (_sum("what, result", _rate("slotcar_reloads_total")) + " > 0", "{{what}} {{result}}"),
        ),
    ),
    Panel(
        "Sessions and calls",
        "Lines that are lost",
        "Of the log, as nobody takes them, and of the audit's file, as it cannot be written.",
        (
            (_sum("instance", _rate("slotcar_log_lines_dropped_total")), "{{instance}} log"),
            (_sum("instance", _rate("slotcar_audit_failures_total")), "{{instance}} audit"),
        ),
        unit="ops",
    ),
    Panel(
        "Sessions and calls",
        "Events",
        "",
        ((_sum("kind", _rate("slotcar_events_total")) + " > 0", "{{kind}}"),),
        unit="ops",
        span=24,
    ),
)


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | bargauge.Panel | table.Panel:
    builders = {
        Kind.LINES: timeseries.Panel,
        Kind.NUMBER: stat.Panel,
        Kind.BARS: bargauge.Panel,
        Kind.TABLE: table.Panel,
    }
    built = builders[panel.kind]().title(panel.title).description(panel.text).datasource(_SOURCE).unit(panel.unit)
    for index, (expression, legend) in enumerate(panel.queries):
        built = built.with_target(_query(panel.kind, chr(ord("A") + index), expression, legend))
    if isinstance(built, bargauge.Panel):
        built = built.orientation(VizOrientation.HORIZONTAL).min(0).max(1)
    return built.span(panel.span).height(_HEIGHT)


def _query(kind: Kind, letter: str, expression: str, legend: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().ref_id(letter).expr(expression).legend_format(legend)
    if kind is Kind.TABLE:
        return query.instant().format(PromQueryFormat.TABLE)
    return query.range() if kind is Kind.LINES else query.instant()


def build() -> dashboard.Dashboard:
    """The dashboard, with rows in the order in which PANELS first names them."""
    built = (
        dashboard.Dashboard("slotcar")
        .uid("slotcar")
        .description("LoRA slots and the Forwards over them: see docs/runbook.md for what to do.")
        .tags(["slotcar", "lora"])
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("instance")
            .label("Sidecar")
            .datasource(_SOURCE)
            .query("label_values(slotcar_build_info, instance)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for row in dict.fromkeys(panel.row for panel in PANELS):
        built = built.with_row(dashboard.Row(row))
        for panel in PANELS:
            if panel.row == row:
                built = built.with_panel(_panel(panel))
    return built


def text() -> str:
    """The dashboard as Grafana imports it."""
    return JSONEncoder(sort_keys=True, indent=2).encode(build().build()) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
