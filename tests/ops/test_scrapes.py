"""A real Prometheus scrapes a real sidecar under load, and its queries say what the clients know that they did."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import slotcar_client
from slotcar_client import SourceDenied
from slotcar_sidecar.core.thrash import THRASH_SECONDS

from tests.faults.gauges import Gauges
from tests.faults.oracle import Library, spec_file
from tests.ops.conftest import Promtool
from tests.ops.load import SITE, SITES, Engine, Told, unload_under
from tests.ops.prometheus import Prometheus
from tests.server import SidecarProcess
from tests.unit.ops.promql import filled_in, queries
from tests.waiting import eventually

pytestmark = [pytest.mark.ops, pytest.mark.timeout(300)]

SLOTS = 4
PLANES = ("stream", "ring", "direct")
NAMES = tuple(f"adapter-{letter}" for letter in "abcdefg")
STEPS = 25
# Of a server without these, and whose calls all were well.
UNUSED_PANELS = {
    *("Remote sources", "Disk tier", "Calls that were refused", "Reloads", "Life that certificates have left"),
}


@pytest.fixture
def library(tmp_path: Path) -> Library:
    library = Library(tmp_path / "adapters", SITES)
    for seed, name in enumerate(NAMES):
        library.write(name, seed, [SITE])
    return library


@pytest.fixture
def sidecar(tmp_path: Path, library: Library) -> Iterator[SidecarProcess]:
    home = tmp_path / "server"
    home.mkdir()
    # However slow this machine is, no mapping counts as idle.
    extra = ("--model-spec", str(spec_file(home, SITES)), "--metrics", "127.0.0.1:0", "--mapping-idle-seconds", "600")
    with SidecarProcess(home, library.root, slots=SLOTS, extra=extra) as sidecar:
        yield sidecar


@pytest.fixture
def prometheus(prometheus_binary: str, tmp_path: Path, sidecar: SidecarProcess) -> Iterator[Prometheus]:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    match = re.search(r"at=http://(\S+)/metrics", sidecar.log)
    assert match is not None, sidecar.log
    with Prometheus(prometheus_binary, folder, match[1]) as prometheus:
        yield prometheus


def by(prometheus: Prometheus, label: str, metric: str) -> dict[str, float]:
    """The values of a metric by one of its labels, those of 0 left out."""
    found = prometheus.query(f"sum by ({label}) ({metric}) > 0")
    return {value: number for ((_, value),), number in found.items()}


def work(prometheus: Prometheus, sidecar: SidecarProcess, library: Library) -> dict[str, Told]:
    """Loads, then all engines at a time; what they say that they did, once Prometheus has scraped the end of it."""
    with slotcar_client.connect(sidecar.target) as client, ThreadPoolExecutor(len(PLANES)) as pool:
        for name in NAMES:
            client.load(name, library.root / name, tier="host")
        with pytest.raises(SourceDenied):
            client.load("secret", "/etc")
        engines = [Engine(client, plane, seed) for seed, plane in enumerate(PLANES)]
        for done in [pool.submit(engine.run, NAMES, STEPS) for engine in engines]:
            done.result()
        for number, engine in enumerate(engines):
            engine.step(NAMES[number])
            unload_under(engine, client)
        prometheus.catch_up()
        check_what_is(prometheus, {engine.adapter for engine in engines})
        events = client.events(replay=1000)
        kinds = [next(events).kind for _ in range(events.replayed)]
        events.close()
        for engine in engines:
            engine.session.close()
        prometheus.catch_up()
        assert by(prometheus, "kind", "slotcar_events_total")["evicted"] == kinds.count("evicted")
    return {engine.plane: engine.told for engine in engines}


def check_what_is(prometheus: Prometheus, mapped: set[str]) -> None:
    """While each engine has a mapping of an adapter of its own."""
    assert prometheus.number("slotcar_sessions") == prometheus.number("slotcar_mappings") == len(PLANES)
    assert prometheus.query("slotcar_pins") == {(("owner", "mapping"),): len(PLANES), (("owner", "hold"),): 0}
    assert prometheus.number("sum(slotcar_slots)") == SLOTS
    residents = by(prometheus, "adapter", "slotcar_adapter_bytes")
    assert mapped <= residents.keys() <= set(NAMES)
    assert by(prometheus, "adapter", "slotcar_adapter_pins") == dict.fromkeys(mapped, 1)
    assert prometheus.number('slotcar_tier_adapters{tier="device"}') == len(residents)
    (router,) = prometheus.query("slotcar_lora_requests_info")
    labels = dict(router)
    assert labels.pop("max_lora") == str(SLOTS)
    assert set(labels.pop("running_lora_adapters").split(",")) == residents.keys()
    assert labels == {}, "an empty label is no label to Prometheus"


def test_the_numbers_are_those_of_the_clients(
    prometheus: Prometheus, sidecar: SidecarProcess, library: Library, promtool: Promtool
) -> None:
    start = time.monotonic()
    told = work(prometheus, sidecar, library)
    forwards = 'slotcar_forwards_total{reason="OK"}'
    assert by(prometheus, "plane", forwards) == {plane: each.forwards for plane, each in told.items()}
    assert by(prometheus, "plane", "slotcar_forward_rows_total") == {plane: each.rows for plane, each in told.items()}
    for direction in ("in", "out"):
        moved = by(prometheus, "plane", f'slotcar_forward_bytes_total{{direction="{direction}"}}')
        assert moved == {plane: getattr(told[plane], f"{direction}_bytes") for plane in ("stream", "ring")}
    assert [each.recoveries for each in told.values()] == [1, 1, 1]
    assert prometheus.number("slotcar_recoveries_total") == len(PLANES)
    stale = by(prometheus, "plane", 'slotcar_forwards_total{reason="LAYOUT_STALE"}')
    assert stale == {"stream": 1, "ring": 1}
    timed = by(prometheus, "plane", "slotcar_forward_seconds_count")
    assert timed == {plane: told[plane].forwards + stale[plane] for plane in stale}
    assert prometheus.number('slotcar_rpcs_total{method="SetMapping",reason="OK"}') == sum(
        each.mappings + each.recoveries for each in told.values()
    )
    check_loads(prometheus, told, time.monotonic() - start)
    promtool("check", "metrics", stdin=Gauges(sidecar).text())


def check_loads(prometheus: Prometheus, told: dict[str, Told], seconds: float) -> None:
    """Fills, hits and evictions add up, whoever filled."""
    fills = prometheus.number('slotcar_load_stage_seconds_count{stage="fill"}')
    lookups = by(prometheus, "result", 'slotcar_tier_lookups_total{tier="device"}')
    asked = sum(each.mappings + each.recoveries for each in told.values())
    assert sum(lookups.values()) == asked
    assert lookups["miss"] >= fills  # two engines may wait for one fill
    evicted = prometheus.number('sum(slotcar_evictions_total{tier="device"})')
    assert by(prometheus, "reason", 'slotcar_evictions_total{tier="device"}') == {"mapping": evicted}
    assert evicted == prometheus.number('slotcar_events_total{kind="evicted"}')
    forced = len(PLANES)
    assert prometheus.number('slotcar_slots{state="occupied"}') == fills - evicted - forced
    if seconds < THRASH_SECONDS:
        first = len(set().union(*(each.asked for each in told.values())))
        assert prometheus.number("slotcar_thrash_total") == fills - first - forced
    loads = by(prometheus, "reason", "slotcar_loads_total")
    assert loads["SOURCE_DENIED"] == 1
    assert loads["OK"] >= len(NAMES) + forced + fills


def test_what_leaves_its_slot_leaves_no_series(
    prometheus: Prometheus, sidecar: SidecarProcess, library: Library
) -> None:
    with slotcar_client.connect(sidecar.target) as client:
        for name in NAMES[:SLOTS]:
            client.load(name, library.root / name)
        prometheus.catch_up()
        assert by(prometheus, "adapter", "slotcar_adapter_bytes").keys() == set(NAMES[:SLOTS])
        client.load(NAMES[SLOTS], library.root / NAMES[SLOTS])
        client.unload(NAMES[1])
        prometheus.catch_up()
        left = by(prometheus, "adapter", "slotcar_adapter_bytes")
    assert left.keys() == {*NAMES[2 : SLOTS + 1]}
    assert len(prometheus.query("slotcar_lora_requests_info")) == 1


def test_rules_and_panels_have_answers_and_a_sidecar_that_died_is_seen(
    prometheus: Prometheus, sidecar: SidecarProcess, library: Library
) -> None:
    prometheus.catch_up()  # a rate is of what came after the first scrape
    with slotcar_client.connect(sidecar.target) as client:
        engine = Engine(client, "ring", 1)
        client.load(NAMES[0], library.root / NAMES[0])
        for _ in range(3):
            engine.step(NAMES[0])
        eventually(lambda: prometheus.query("slotcar:tier_hits:ratio_rate5m"))
        prometheus.catch_up()
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
        assert prometheus.query("ALERTS") == {}
        answers = [(title, prometheus.query(filled_in(expression))) for title, expression in queries()]
        assert {title for title, _ in answers} - {title for title, found in answers if found} == UNUSED_PANELS
        sidecar.kill()
        eventually(lambda: prometheus.query('ALERTS{alertname="SlotcarDown"}'))
        assert prometheus.number("up") == 0
