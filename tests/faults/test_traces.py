"""Traces of a real sidecar, as a collector gets them: from the engine's span to the stages of a load."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import slotcar_client
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from slotcar_client import AdapterNotFound, Client, Session

from tests.fakes.collector import Collector
from tests.faults.gauges import Gauges
from tests.faults.oracle import Library, spec_file
from tests.server import SidecarProcess
from tests.waiting import PATIENCE_SECONDS, eventually

SITE, FEATURES = "layer", 64
A, B = "a", "b"
SERVICE, ENGINE = "slotcar.v1.AdapterService", "slotcar.v1.EngineService"

Start = Callable[..., SidecarProcess]


class Stage(NamedTuple):
    """A sidecar with one slot that sends its traces to `collector`, all Forwards among them."""

    sidecar: SidecarProcess
    collector: Collector
    library: Library
    client: Client


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), {SITE: (FEATURES, FEATURES)})
    for seed, name in enumerate((A, B)):
        library.write(name, seed=seed, sites=[SITE])
    return library


def settings(folder: Path, library: Library, endpoint: str) -> tuple[str, ...]:
    spec = spec_file(folder, library.sites)
    return ("--model-spec", str(spec), "--otlp-endpoint", endpoint, "--trace-sample", "1")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("s")
    with ExitStack() as stack:
        collector = stack.enter_context(Collector())
        extra = (*settings(folder, library, collector.endpoint), "--metrics", "127.0.0.1:0")
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
        sidecar = SidecarProcess(folder, library.root, slots=1, extra=extra, environment=environment)
        stack.enter_context(sidecar)
        client = stack.enter_context(slotcar_client.connect(sidecar.target))
        yield Stage(sidecar, collector, library, client)


def compute(session: Session, name: str) -> None:
    session.set_mapping([name], load=True)
    session.forward({SITE: torch.ones(1, FEATURES)}, [1])


def test_an_engine_s_span_has_the_call_below_it_and_the_load_s_stages_below_that(stage: Stage) -> None:
    tracer = TracerProvider().get_tracer("engine")
    with tracer.start_as_current_span("engine") as span:
        stage.client.load(A, stage.library.root / A)
    ids = span.get_span_context()
    trace, parent = f"{ids.trace_id:032x}", f"{ids.span_id:016x}"
    load = stage.collector.wait(f"{SERVICE}/LoadAdapter", trace=trace)
    assert load.parent == parent
    assert load.attributes["rpc.response.status_code"] == "OK"
    assert load.attributes["slotcar.ref"] == A
    assert load.attributes["slotcar.epoch"] in stage.sidecar.log
    for name in ("load.read", "load.wait", "load.fill"):
        part = stage.collector.wait(name, trace=trace)
        assert part.parent == load.span
        assert part.seconds <= load.seconds
        assert part.attributes["slotcar.digest"] in stage.library.parts
    assert stage.collector.resources[0]["service.name"] == "slotcar"


def test_a_mapping_has_its_load_below_it_and_forwards_have_their_parts(stage: Stage) -> None:
    client = stage.client
    for name in (A, B):
        client.load(name, stage.library.root / name, tier="host")
    with client.session(transport="unary") as session:
        compute(session, B)
    mapping = stage.collector.wait(f"{ENGINE}/SetMapping")
    assert stage.collector.wait("load.fill", trace=mapping.trace).parent == mapping.span
    forward = stage.collector.wait(f"{ENGINE}/Forward")
    for name in ("forward.queue", "forward.compute"):
        assert stage.collector.wait(name, trace=forward.trace).parent == forward.span
    with client.session(transport="stream") as session:
        compute(session, B)
    root = stage.collector.wait("Forward")
    assert (root.parent, root.attributes["slotcar.plane"]) == ("", "stream")
    assert stage.collector.wait("forward.compute", trace=root.trace).parent == root.span


def test_what_the_engine_does_not_trace_is_not_traced(stage: Stage) -> None:
    tracer = TracerProvider(sampler=ALWAYS_OFF).get_tracer("engine")
    with tracer.start_as_current_span("engine") as span, stage.client.session(transport="unary") as session:
        compute(session, A)
    hidden = f"{span.get_span_context().trace_id:032x}"
    stage.client.unload(A)  # which has no caller's trace, and comes after
    stage.collector.wait(f"{SERVICE}/UnloadAdapter")
    assert all(each.trace != hidden for each in stage.collector.spans)


def test_a_refusal_is_an_error_with_its_reason(stage: Stage) -> None:
    with pytest.raises(AdapterNotFound):
        stage.client.unload("nobody")
    span = stage.collector.wait(f"{SERVICE}/UnloadAdapter", error="ADAPTER_NOT_FOUND")
    assert span.attributes["rpc.response.status_code"] == "NOT_FOUND"
    assert span.attributes["error.type"] == "ADAPTER_NOT_FOUND"


def test_the_metrics_name_traces_that_there_are(stage: Stage) -> None:
    stage.client.load(B, stage.library.root / B)
    url = Gauges(stage.sidecar).url
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request) as response:
        shown = [line for line in response.read().decode().splitlines() if 'trace_id="' in line]
    assert {line.partition("_bucket")[0] for line in shown} >= {"slotcar_load_stage_seconds"}
    for line in shown:
        trace, span = (line.partition(f'{name}="')[2].partition('"')[0] for name in ("trace_id", "span_id"))
        eventually(lambda t=trace, s=span: any((e.trace, e.span) == (t, s) for e in stage.collector.spans))


def test_the_end_sends_what_is_left(start_sidecar: Start, library: Library, tmp_path: Path) -> None:
    with Collector() as collector:
        extra = settings(tmp_path, library, collector.endpoint)
        sidecar = start_sidecar(library.root, extra=extra, environment={"OTEL_BSP_SCHEDULE_DELAY": "3600000"})
        with slotcar_client.connect(sidecar.target) as client:
            client.load(A, library.root / A)
        assert collector.spans == []
        assert sidecar.stop() == 0
        assert {span.name for span in collector.spans} >= {f"{SERVICE}/LoadAdapter", "load.fill"}


@pytest.mark.parametrize("is_there", [False, True], ids=["down", "hanging"])
def test_a_collector_that_does_not_answer_holds_up_nothing(
    start_sidecar: Start, library: Library, tmp_path: Path, is_there: bool
) -> None:
    """Calls are answered, spans beyond the bound are dropped, and the end comes."""
    with Collector(hanging=True) as collector:
        endpoint = collector.endpoint if is_there else "http://127.0.0.1:9"
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_BSP_MAX_QUEUE_SIZE": "64"}
        environment |= {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "32"}
        extra = settings(tmp_path, library, endpoint)
        sidecar = start_sidecar(library.root, extra=extra, environment=environment)
        with slotcar_client.connect(sidecar.target) as client, client.session(transport="unary") as session:
            client.load(A, library.root / A)
            compute(session, A)
            if is_there:
                assert collector.asked.wait(PATIENCE_SECONDS)
            for _ in range(100):
                session.forward({SITE: torch.ones(1, FEATURES)}, [1])
        assert "Queue full" in sidecar.log or not is_there
        assert sidecar.stop() == 0


def test_without_the_library_the_setting_is_refused(library: Library, tmp_path: Path) -> None:
    """As in an installation without the extra."""
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("raise ImportError('not installed')")
    environment = {"PYTHONPATH": str(tmp_path)}
    extra = ("--otlp-endpoint", "http://127.0.0.1:4317")
    with pytest.raises(AssertionError, match=r"ended with 1"):
        SidecarProcess(tmp_path, library.root, extra=extra, environment=environment).start()
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "--otlp-endpoint http://127.0.0.1:4317 needs OpenTelemetry" in log
    assert "slotcar[otel]" in log
    assert "Traceback" not in log
