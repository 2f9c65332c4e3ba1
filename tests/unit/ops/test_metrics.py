"""The catalogue is what is exported, written down and named by Prometheus' rules; gauges show one snapshot."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from slotcar_sidecar.core.calls import Capacity, TierUse
from slotcar_sidecar.core.errors import Reason
from slotcar_sidecar.core.ids import AdapterName, Digest, Epoch, SlotId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.tally import BOUNDS_SECONDS, Work
from slotcar_sidecar.ops.catalogue import BY_NAME, CATALOGUE, Described, Kind
from slotcar_sidecar.ops.gauges import Naming, ResidentName, Snapshot
from slotcar_sidecar.ops.metrics import Metrics

from tests.golden import metrics as golden

SQL = Digest("sha256:" + "a" * 64)
NOTHING = Capacity({}, 0, 0, 0, 0, 0, TierUse(0, 0, 0), TierUse(0, 0, 0), (0, 0), (0, 0), 0, 0, {})
EMPTY = Snapshot(1000.0, Layout.empty(Epoch("e"), 2), NOTHING, {"mapping": 0, "hold": 0}, 0, 0)
NAMED = Naming()
RESIDENT = ResidentName(AdapterName("sql"), SQL, SlotId(1), 3, 4096)


def exported(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


def shown(snapshot: Snapshot, naming: Naming = NAMED) -> str:
    metrics = Metrics()
    metrics.watch(lambda: snapshot, naming)
    return exported(metrics)


def test_what_is_exported_is_the_catalogue() -> None:
    metrics = Metrics()
    metrics.watch(lambda: EMPTY, Naming())
    found = {family.name: family for family in metrics.registry.collect()}
    assert found.keys() == BY_NAME.keys()
    for name, family in found.items():
        one = BY_NAME[name]
        assert (family.type, family.unit, family.documentation) == (one.kind, one.unit, one.text)


def test_the_catalogue_is_written_down() -> None:
    page = golden.PAGE.read_text(encoding="utf-8")
    assert page == golden.page_with_table(page), "run make docs"
    assert golden.NAMES.read_text(encoding="utf-8") == golden.names_text(), "run make golden, if it is on purpose"


@pytest.mark.parametrize("one", CATALOGUE, ids=lambda one: one.name)
def test_a_metric_is_named_by_the_rules_of_prometheus(one: Described) -> None:
    """A unit of base units at the end, no suffix that says a type; a text that says what it is."""
    assert re.fullmatch(r"slotcar_[a-z]+(_[a-z]+)*", one.name)
    assert one.unit in ("", "seconds", "bytes")
    assert one.name.endswith(f"_{one.unit}") == bool(one.unit)
    assert not one.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert one.text[0].isupper() or one.text[0] in "01"
    assert one.text.endswith(".")
    assert bool(one.buckets) == (one.kind is Kind.HISTOGRAM)
    assert not {"le", "quantile", "job", "instance"} & set(one.labels)


def test_what_alerts_watch_has_a_sample_before_it_happens() -> None:
    """Else the first time would be no increase."""
    text = exported(Metrics())
    for plane in ("unary", "stream", "ring", "direct"):
        for reason in ("OK", "LAYOUT_STALE", "INTERNAL"):
            assert f'slotcar_forwards_total{{plane="{plane}",reason="{reason}"}} 0.0' in text
    assert text.count("slotcar_loads_total{") == len(Reason) + 1
    for method in ("SetMapping", "LoadAdapter"):
        for reason in ("SLOTS_EXHAUSTED", "INTERNAL"):
            assert f'slotcar_rpcs_total{{method="{method}",reason="{reason}"}} 0.0' in text
    assert "slotcar_thrash_total 0.0" in text
    assert "slotcar_desired_in_force 1.0" in text


def test_forwards_of_threads_count_while_they_run_and_after() -> None:
    metrics = Metrics()
    tally = metrics.begin_tally("ring")
    tally.add(0.002, "OK", Work(rows=3, in_bytes=30, out_bytes=50), queue_seconds=0.5)
    tally.add(0.1, "LAYOUT_STALE")
    metrics.forward("ring", 0.002, "OK", Work(rows=1, in_bytes=10, out_bytes=20), 0.25)
    during = exported(metrics)
    for sample in (
        'slotcar_forwards_total{plane="ring",reason="OK"} 2.0',
        'slotcar_forwards_total{plane="ring",reason="LAYOUT_STALE"} 1.0',
        'slotcar_forward_rows_total{plane="ring"} 4.0',
        'slotcar_forward_bytes_total{direction="in",plane="ring"} 40.0',
        'slotcar_forward_bytes_total{direction="out",plane="ring"} 70.0',
        'slotcar_forward_queue_seconds_total{plane="ring"} 0.75',
        'slotcar_forward_seconds_count{plane="ring"} 3.0',
        f'slotcar_forward_seconds_bucket{{le="{BOUNDS_SECONDS[5]}",plane="ring"}} 2.0',
    ):
        assert f"\n{sample}\n" in during
    metrics.end_tally("ring", tally)
    assert exported(metrics) == during


def test_an_entry_that_the_disk_evicts_is_an_eviction() -> None:
    metrics = Metrics()
    metrics.disk("remove", "evicted")
    metrics.disk("remove", "forgotten")
    assert 'slotcar_evictions_total{reason="capacity",tier="disk"} 1.0' in exported(metrics)


def test_the_device_is_a_tier_of_slots() -> None:
    layout = EMPTY.layout.begin_fill(SlotId(0), SQL).occupy(SlotId(0))
    text = shown(replace(EMPTY, layout=layout, capacity=replace(NOTHING, slot_bytes=100, pinned=1)))
    for name, value in (("adapters", 1), ("used_bytes", 100), ("capacity_bytes", 200), ("held_bytes", 100)):
        assert f'slotcar_tier_{name}{{tier="device"}} {value}.0' in text


def test_residents_are_named_and_gone_with_the_next_snapshot() -> None:
    snapshot = replace(EMPTY, residents=(RESIDENT,), waiting=(AdapterName("chat"), AdapterName("team/x")))
    metrics, now = Metrics(), [snapshot]
    metrics.watch(lambda: now[0], Naming())
    text = exported(metrics)
    assert f'slotcar_adapter_pins{{adapter="sql",digest="{SQL.short}",slot="1"}} 3.0' in text
    assert f'slotcar_adapter_bytes{{adapter="sql",digest="{SQL.short}"}} 4096.0' in text
    labels = 'max_lora="2",running_lora_adapters="sql",waiting_lora_adapters="chat,team/x"'
    assert f"slotcar_lora_requests_info{{{labels}}} 1000.0" in text
    now[0] = EMPTY
    assert "sql" not in exported(metrics)


def test_the_gauge_of_routers_is_called_as_they_look_for_it() -> None:
    text = shown(replace(EMPTY, residents=(RESIDENT,)), Naming(lora_info="vllm:lora_requests_info"))
    assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""} 1000.0' in text
    assert "slotcar_lora_requests_info" not in text


def test_no_adapter_is_named_where_none_is_to_be() -> None:
    text = shown(replace(EMPTY, residents=(RESIDENT,)), Naming(names_adapters=False))
    assert "sql" not in text
    assert "lora" not in text
