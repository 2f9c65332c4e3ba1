"""/metrics: the golden names, and values that agree with what was done."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from slotcar.v1 import adapter_pb2, engine_service_pb2
from slotcar.v1 import adapter_service_pb2 as pb

from tests.conformance.calls import parts
from tests.conformance.items import forward, item
from tests.conformance.metric_names import exported, golden, use
from tests.conformance.refusals import refused
from tests.conformance.target import ABSENT_DIGEST, PATIENCE_SECONDS, Streamed, Target
from tests.waiting import eventually

Sample = tuple[str, tuple[tuple[str, str], ...]]


@pytest.fixture(scope="module")
def measured(server: Target, start_target: Callable[..., Target]) -> Target:
    return server if server.metrics_url is not None else start_target().learn()


@pytest.fixture(autouse=True)
def without_adapters(measured: Target) -> None:
    measured.unload_all()


def sample(name: str, **labels: str) -> Sample:
    return name, tuple(sorted(labels.items()))


@contextmanager
def counted(target: Target, wanted: dict[Sample, float]) -> Iterator[None]:
    """Checks by how much these samples grow."""
    before = target.metrics()
    yield
    after = target.metrics()
    grown = {key: after.get(key, 0) - before.get(key, 0) for key in wanted}
    assert grown == wanted


def openmetrics(target: Target) -> str:
    assert target.metrics_url is not None
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(target.metrics_url, headers=accept)
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        return response.read().decode()


# What this server has none of: remote sources, files that are read again, certificates.
_ONLY_ELSEWHERE = {
    *("slotcar_fetched_bytes", "slotcar_fetch_retries", "slotcar_fetch_failures"),
    *("slotcar_reloads", "slotcar_reload_failing", "slotcar_certificate_expiry_timestamp_seconds"),
}


def test_names_types_units_and_labels_are_the_golden_ones(measured: Target) -> None:
    """They change only on purpose: `make golden` accepts that."""
    use(measured)
    wanted, found = golden(), {shown.name: (shown, is_used) for shown, is_used in exported(openmetrics(measured))}
    assert found.keys() == wanted.keys()
    unused = {name for name, (shown, is_used) in found.items() if not is_used and shown.type != "info"}
    assert unused <= _ONLY_ELSEWHERE
    for name, (shown, _) in found.items():
        assert shown == (wanted[name] if name not in unused else wanted[name]._replace(labels=frozenset()))


def test_loads_are_counted(measured: Target) -> None:
    wanted = {
        sample("slotcar_rpcs_total", method="LoadAdapter", reason="OK"): 3,
        sample("slotcar_rpcs_total", method="LoadAdapter", reason="SOURCE_DENIED"): 1,
        sample("slotcar_rpcs_total", method="UnloadAdapter", reason="OK"): 1,
        sample("slotcar_rpcs_total", method="GetAdapter", reason="ADAPTER_NOT_FOUND"): 1,
        sample("slotcar_events_total", kind="loaded"): 3,
        sample("slotcar_events_total", kind="refused"): 2,
        sample("slotcar_events_total", kind="unloaded"): 1,
        sample("slotcar_loads_total", reason="OK"): 3,
        sample("slotcar_loads_total", reason="SOURCE_DENIED"): 1,
        sample("slotcar_loads_total", reason="DIGEST_MISMATCH"): 1,
        sample("slotcar_tier_lookups_total", tier="device", result="hit"): 2,
        sample("slotcar_tier_lookups_total", tier="device", result="miss"): 1,
        sample("slotcar_tier_lookups_total", tier="host", result="hit"): 1,
        sample("slotcar_tier_lookups_total", tier="host", result="miss"): 1,
        sample("slotcar_load_stage_seconds_count", stage="read"): 3,
        sample("slotcar_load_stage_seconds_count", stage="wait"): 1,
        sample("slotcar_load_stage_seconds_count", stage="fill"): 1,
        sample("slotcar_adapters"): 1,
    }
    with counted(measured, wanted):
        digest = measured.load("sql").adapter.digest
        measured.load("sql")
        measured.load("sql", ref=f"other@{digest}", source="")
        measured.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref="other"), timeout=PATIENCE_SECONDS)
        refused(measured.load, "bad", source="/etc")
        refused(measured.load, "bad", ref=f"bad@{ABSENT_DIGEST}", source=str(measured.folder("sql")))
        refused(measured.adapters.GetAdapter, pb.GetAdapterRequest(ref="nobody"), timeout=PATIENCE_SECONDS)


def test_forwards_are_counted_by_plane_and_reason(measured: Target) -> None:
    if measured.plane != "unary":
        pytest.skip("what it calls is counted as unary calls and as a stream")
    measured.load("sql")
    stream = Streamed(measured)
    wanted = {
        sample("slotcar_forwards_total", plane="unary", reason="OK"): 2,
        sample("slotcar_forwards_total", plane="unary", reason="LAYOUT_STALE"): 1,
        sample("slotcar_forwards_total", plane="stream", reason="OK"): 1,
        sample("slotcar_forwards_total", plane="stream", reason="MAPPING_NOT_FOUND"): 1,
        sample("slotcar_forward_rows_total", plane="unary"): 7,
        sample("slotcar_forward_rows_total", plane="stream"): 4,
        sample("slotcar_forward_bytes_total", plane="unary", direction="in"): 7 * measured.site.in_features * 4,
        sample("slotcar_forward_bytes_total", plane="unary", direction="out"): 7 * measured.site.out_features * 4,
        sample("slotcar_forward_seconds_count", plane="unary"): 3,
        sample("slotcar_forward_seconds_count", plane="stream"): 2,
        sample("slotcar_rpcs_total", method="Forward", reason="OK"): 2,
        sample("slotcar_rpcs_total", method="Forward", reason="LAYOUT_STALE"): 1,
        sample("slotcar_rpcs_total", method="SetMapping", reason="OK"): 1,
        sample("slotcar_rpcs_total", method="OpenSession", reason="OK"): 1,
        sample("slotcar_rpcs_total", method="ForwardStream", reason="OK"): 1,
        sample("slotcar_events_total", kind="forward_stale"): 1,
        sample("slotcar_events_total", kind="session_opened"): 1,
        sample("slotcar_events_total", kind="session_ended"): 1,
    }
    with counted(measured, wanted), measured.session() as session:
        generation = session.set_mapping("sql", None).generation
        good = forward(session, generation, [3, 1], item(measured, 4))
        small = forward(session, generation, [3, 0], item(measured, 3))
        for request in (good, small):
            measured.engine.Forward(request, timeout=PATIENCE_SECONDS)
        stale = forward(session, 0, [3, 1], item(measured, 4))
        refused(measured.engine.Forward, stale, timeout=PATIENCE_SECONDS)
        unknown = forward(session, generation, [3, 1], item(measured, 4), mapping_id=9)
        for request in (good, unknown):
            stream.ask(engine_service_pb2.ForwardStreamRequest(forward=request))
        stream.send(None)
        assert next(stream.call, None) is None
        measured.close_session(session.id)
        assert {message.WhichOneof("message") for message in session.call} <= {"layout", "heartbeat"}


def test_every_refusal_of_a_stream_is_counted(measured: Target) -> None:
    stream = Streamed(measured)
    before = measured.metrics()
    with measured.session() as session:
        bad = forward(session, 1, [1], item(measured, 1, mode=99))
        stream.ask(engine_service_pb2.ForwardStreamRequest(forward=bad))
        stream.ask(engine_service_pb2.ForwardStreamRequest())
        after = measured.metrics()
    stream.close()
    names = ("slotcar_forwards_total", "slotcar_rpcs_total")
    grown = [
        after[key] - before.get(key, 0)
        for key in after
        if key[0] in names and ("reason", "REQUEST_INVALID") in key[1] and after[key] != before.get(key, 0)
    ]
    assert sum(grown) == 2


def test_gauges_show_what_is(measured: Target) -> None:
    slots = measured.server.slots
    names = measured.fill_slots()
    measured.adapters.KeepAdapter(pb.KeepAdapterRequest(ref=names[0]), timeout=PATIENCE_SECONDS)
    with measured.session() as session:
        session.set_mapping(*names, mapping_id=1)
        session.set_mapping(names[0], mapping_id=2)
        measured.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref=names[1]), timeout=PATIENCE_SECONDS)
        session.hold(names[0], 1)
        session.hold(names[0], 2)
        state, now = measured.state(), measured.metrics()
        assert now[sample("slotcar_holds")] == 2
        assert now[sample("slotcar_slots_reserved")] == now[sample("slotcar_mappings_waiting")] == 0
        assert now[sample("slotcar_tier_held_bytes", tier="host")] == state.adapters[0].bytes
        assert now[sample("slotcar_sessions")] == 1
        assert now[sample("slotcar_mappings")] == 2
        assert now[sample("slotcar_pins", owner="mapping")] == slots + 1
        assert now[sample("slotcar_pins", owner="hold")] == 0
        assert now[sample("slotcar_adapters")] == slots - 1
        assert now[sample("slotcar_adapters_kept")] == 1
        assert now[sample("slotcar_slots", state="occupied")] == slots - 1
        assert now[sample("slotcar_slots", state="draining")] == 1
        assert now[sample("slotcar_slots", state="free")] == 0
        assert now[sample("slotcar_slots", state="filling")] == 0
        assert now[sample("slotcar_layout_generation")] == state.layout.version.generation
        assert now[sample("slotcar_tier_adapters", tier="device")] == slots
        size = now[sample("slotcar_tier_capacity_bytes", tier="device")]
        assert now[sample("slotcar_tier_used_bytes", tier="device")] == size > 0
        assert now[sample("slotcar_tier_held_bytes", tier="device")] == size
        held = sum(adapter.bytes for adapter in state.adapters)
        assert now[sample("slotcar_tier_used_bytes", tier="host")] >= held
        assert now[sample("slotcar_tier_capacity_bytes", tier="host")] >= held
    (build,) = [key for key in now if key[0] == "slotcar_build_info"]
    labels = dict(build[1])
    assert labels["version"] == measured.server.version
    assert labels["epoch"] == state.layout.version.epoch
    assert now[build] == 1


def test_holds_reservations_and_calls_that_wait_are_counted(measured: Target) -> None:
    names = measured.fill_slots()
    measured.load("late", target_tier=adapter_pb2.TIER_HOST)
    wanted = {
        sample("slotcar_events_total", kind="held"): 2,
        sample("slotcar_events_total", kind="hold_released"): 2,
        sample("slotcar_rpcs_total", method="HoldAdapter", reason="OK"): 2,
        sample("slotcar_rpcs_total", method="ReleaseHold", reason="OK"): 1,
        sample("slotcar_rpcs_total", method="EndSession", reason="OK"): 1,
        sample("slotcar_rpcs_total", method="SetMapping", reason="SESSION_NOT_FOUND"): 1,
        sample("slotcar_rpcs_total", method="LoadAdapterStream", reason="OK"): 1,
        sample("slotcar_rpcs_total", method="LoadAdapterStream", reason="REQUEST_INVALID"): 1,
        sample("slotcar_rpcs_total", method="OpenSession", reason="SLOTS_EXHAUSTED"): 1,
        sample("slotcar_rpcs_total", method="OpenSession", reason="VERSION_MISMATCH"): 1,
    }
    with counted(measured, wanted):
        with measured.session() as holder, measured.session(reserved_slots=1) as session:
            assert measured.metrics()[sample("slotcar_slots_reserved")] == 1
            session.hold(names[0], 1)
            session.hold(names[0], 2)
            session.release_hold(1)
            holder.set_mapping(*names[1:])
            refused(measured.session(reserved_slots=2**20).__enter__)
            refused(measured.session(client_version="999.0.0").__enter__)
            waiting = session.set_later(names[0], "late")
            eventually(measured.is_waiting(1))
            assert measured.metrics()[sample("slotcar_mappings_waiting")] == 1
            request = pb.EndSessionRequest(session=session.short)
            measured.adapters.EndSession(request, timeout=PATIENCE_SECONDS)
            refused(waiting.result)
        sent = parts(measured.folder("sent"), "sent")
        measured.adapters.LoadAdapterStream(iter(sent), timeout=PATIENCE_SECONDS)
        refused(measured.adapters.LoadAdapterStream, iter(sent[:-1]), timeout=PATIENCE_SECONDS)


def test_an_eviction_that_is_undone_at_once_is_thrash(measured: Target) -> None:
    first, *others = measured.fill_slots()
    wanted = {
        sample("slotcar_evictions_total", tier="device", reason="load"): 1,
        sample("slotcar_evictions_total", tier="device", reason="mapping"): 1,
        sample("slotcar_thrash_total"): 1,
        sample("slotcar_tier_lookups_total", tier="device", result="miss"): 2,
        sample("slotcar_tier_lookups_total", tier="device", result="hit"): 1,
        sample("slotcar_loads_total", reason="OK"): 2,
    }
    with counted(measured, wanted), measured.session() as session:
        measured.load("one-more")
        session.set_mapping(first, "one-more", None, first, load=True)
    assert len(others) == measured.server.slots - 1


def test_a_stale_mapping_that_is_set_again_by_digest_is_a_recovery(measured: Target) -> None:
    """Other bytes under the name are none, and nor is what was still current."""
    digest = measured.load("sql").adapter.digest
    with counted(measured, {sample("slotcar_recoveries_total"): 1}), measured.session() as session:
        generation = session.set_mapping("sql").generation
        session.set_mapping("sql", mapping_id=2)
        measured.adapters.UnloadAdapter(pb.UnloadAdapterRequest(ref="sql", force=True), timeout=PATIENCE_SECONDS)
        measured.load("sql")
        stale = forward(session, generation, [1], item(measured, 1))
        refused(measured.engine.Forward, stale, timeout=PATIENCE_SECONDS)
        session.set_mapping(f"sql@{digest}")
        session.set_mapping(f"sql@{digest}")
        session.set_mapping(None, mapping_id=2)


def test_a_call_that_waited_for_slots_is_timed(measured: Target) -> None:
    names = measured.fill_slots()
    with counted(measured, {sample("slotcar_mapping_wait_seconds_count"): 1}):
        with measured.session() as holder, measured.session() as session:
            holder.set_mapping(*names)
            measured.load("late", target_tier=adapter_pb2.TIER_HOST)
            waiting = session.set_later("late")
            eventually(measured.is_waiting(1))
            now = measured.metrics_text()
            assert 'waiting_lora_adapters="late"' in now
            holder.release_mapping()
            waiting.result()
        assert 'waiting_lora_adapters=""' in measured.metrics_text()


def test_as_many_are_named_as_are_to_be(start_target: Callable[..., Target]) -> None:
    """The latest used first; all of them count."""
    extra = ("--metrics-adapters", "1", "--metrics-lora-info", "vllm:lora_requests_info")
    target = start_target(slots=3, extra=extra).learn()
    for name in ("first", "second", "first"):
        target.load(name)
    with target.session() as session:
        session.set_mapping("first")
        now = target.metrics()
    assert now[sample("slotcar_tier_adapters", tier="device")] == 2
    assert {dict(labels)["adapter"] for name, labels in now if name == "slotcar_adapter_pins"} == {"first"}
    (router,) = [dict(labels) for name, labels in now if name == "vllm:lora_requests_info"]
    assert router == {"max_lora": "3", "running_lora_adapters": "first", "waiting_lora_adapters": ""}


def test_residents_have_series_and_those_that_left_have_none(measured: Target) -> None:
    """Names are the operator's, and without bound: only gauges have them, for as long as they are in a slot."""
    digest = measured.load("very-special-name").adapter.digest
    refused(measured.load, "another-special-name", source="/etc")
    measured.load("a-special-name-in-memory", target_tier=adapter_pb2.TIER_HOST)
    named = [line for line in measured.metrics_text().splitlines() if "special-name" in line]
    assert sorted(line.partition("{")[0] for line in named) == [
        "slotcar_adapter_bytes",
        "slotcar_adapter_pins",
        "slotcar_lora_requests_info",
    ]
    assert all("another" not in line and "in-memory" not in line for line in named)
    assert all(f'digest="{digest[:19]}"' in line for line in named if "running" not in line)
    measured.unload_all()
    assert "special-name" not in measured.metrics_text()
