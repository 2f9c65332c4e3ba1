"""Spans: which calls have one, what of their caller's they take over, and how their parts hang together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.exposition import generate_latest
from slotcar_sidecar.core.call import CALL, Call
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.tally import Work
from slotcar_sidecar.ops.metrics import Metrics
from slotcar_sidecar.ops.tracing import CallSpan, Headers, Traces, make_provider

LOAD = "slotcar.v1.AdapterService/LoadAdapter"
FORWARD = "slotcar.v1.EngineService/Forward"
DIGEST = Digest("sha256:" + "ab" * 32)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@dataclass
class Bench:
    """Traces with an exporter that keeps what it gets; `chance` is what comes out of chance next."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    chance: float = 0.5

    def __post_init__(self) -> None:
        self.provider = make_provider("1", SimpleSpanProcessor(self.exporter))
        self.traces = Traces(self.provider.get_tracer("test"), 0.1, lambda: self.chance, lambda: 10**18)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def call(self, method: str, headers: Headers = (), inside: Callable[[], object] = lambda: None) -> CallSpan:
        """An RPC in a context of its own, as the interceptor makes it."""

        def run() -> CallSpan:
            span = self.traces.begin(method, headers, "sql")
            CALL.set(Call(method.rpartition("/")[2], "unix:", span.trace, span.span_id))
            inside()
            span.end("OK", "")
            return span

        return copy_context().run(run)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.provider.shutdown()


def test_a_load_has_a_span_with_its_parts(bench: Bench) -> None:
    def stages() -> None:
        for stage, seconds in (("read", 3.0), ("wait", 2.0), ("fill", 1.0)):
            assert bench.traces.load_stage(stage, seconds, DIGEST) is not None
        bench.traces.mapping_waited(0.5)

    bench.call(LOAD, inside=stages)
    root = bench.spans[LOAD]
    assert root.parent is None
    assert root.attributes == {"rpc.system.name": "grpc", "rpc.method": LOAD, "slotcar.ref": "sql"} | {
        "rpc.response.status_code": "OK"
    }
    for name, seconds in (("load.read", 3), ("load.wait", 2), ("load.fill", 1), ("mapping.wait", 0.5)):
        part = bench.spans[name]
        assert part.parent is not None
        assert part.parent.span_id == root.context.span_id
        assert part.end_time == 10**18
        assert part.start_time == 10**18 - seconds * 10**9


@pytest.mark.parametrize("method", [LOAD, FORWARD, "slotcar.v1.AdapterService/ListAdapters"])
@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_what_the_caller_decided_counts(bench: Bench, method: str, chance: float) -> None:
    bench.chance = chance
    span = bench.call(method, [("traceparent", NOT_SAMPLED)])
    assert (span.trace, span.span_id, bench.spans) == (TRACE, "", {})
    span = bench.call(method, [("traceparent", SAMPLED), ("tracestate", "vendor=1")])
    assert (span.trace, span.span_id != "") == (TRACE, True)
    parent = bench.spans[method].parent
    assert parent is not None
    assert (f"{parent.span_id:016x}", parent.is_remote) == (SPAN, True)


def test_without_a_caller_s_trace_loads_are_traced_and_a_share_of_forwards(bench: Bench) -> None:
    for method in (FORWARD, "slotcar.v1.AdapterService/ListAdapters"):
        bench.call(method)
    assert bench.spans == {}
    for method in (LOAD, "slotcar.v1.AdapterService/LoadAdapterStream", "slotcar.v1.EngineService/SetMapping"):
        bench.call(method)
        assert method in bench.spans
    bench.chance = 0.05
    bench.call(FORWARD)
    bench.call("slotcar.v1.AdapterService/ListAdapters")
    assert FORWARD in bench.spans
    assert "slotcar.v1.AdapterService/ListAdapters" not in bench.spans


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "")],
        [("traceparent", "00-" + "0" * 32 + f"-{SPAN}-01")],
        [("traceparent", f"00-{TRACE}-" + "0" * 16 + "-01")],
        [("traceparent", f"ff-{TRACE}-{SPAN}-01")],
        [("traceparent", SAMPLED + "-more")],
        [("traceparent", SAMPLED.upper())],
        [("traceparent", "x" * 8000)],
        [("traceparent", f"00-{TRACE}\n-{SPAN}-01")],
        [("traceparent", SAMPLED), ("traceparent", NOT_SAMPLED)],
        [("traceparent", SAMPLED.encode())],
        [("traceparent-bin", SAMPLED)],
        [("tracestate", "a=1")],
    ],
)
def test_a_hostile_header_is_as_none(bench: Bench, headers: Headers) -> None:
    bench.call(LOAD, headers)
    assert bench.spans[LOAD].parent is None
    assert f"{bench.spans[LOAD].context.trace_id:032x}" != TRACE
    bench.chance = 0.05
    bench.call(FORWARD, headers)
    assert bench.spans[FORWARD].parent is None


def test_a_hostile_state_is_left_out(bench: Bench) -> None:
    for state in ("", "=", "a" * 5000, ",".join(f"k{i}=v" for i in range(500)), "a=1\x00"):
        bench.exporter.clear()
        bench.call(LOAD, [("traceparent", SAMPLED), ("tracestate", state)])
        assert f"{bench.spans[LOAD].context.trace_id:032x}" == TRACE
        assert len(bench.spans[LOAD].context.trace_state) <= 32


def test_what_is_long_is_cut(bench: Bench) -> None:
    bench.traces.begin(LOAD, (), "x" * 100_000).end("OK", "")
    assert len(str((bench.spans[LOAD].attributes or {})["slotcar.ref"])) == 256


def test_a_refusal_is_an_error_with_its_reason(bench: Bench) -> None:
    bench.traces.begin(LOAD, (), "sql").end("NOT_FOUND", "ADAPTER_NOT_FOUND")
    span = bench.spans[LOAD]
    assert (span.status.is_ok, span.status.description) == (False, "ADAPTER_NOT_FOUND")
    assert (span.attributes or {})["error.type"] == "ADAPTER_NOT_FOUND"


def test_a_forward_shows_its_queue_and_its_computation(bench: Bench) -> None:
    bench.chance = 0.05
    bench.call(FORWARD, inside=lambda: bench.traces.forward("unary", 3.0, "OK", Work(4), 1.0))
    queue, compute = bench.spans["forward.queue"], bench.spans["forward.compute"]
    assert [(queue.start_time, queue.end_time), (compute.start_time, compute.end_time)] == [
        (10**18 - 3 * 10**9, 10**18 - 2 * 10**9),
        (10**18 - 2 * 10**9, 10**18),
    ]
    assert [queue.parent, compute.parent] == [bench.spans[FORWARD].context] * 2


def test_of_a_stream_a_share_of_forwards_has_spans_of_their_own(bench: Bench) -> None:
    """The headers of a stream belong to its opening, and not to each of a million Forwards."""
    assert bench.traces.forward("stream", 1.0, "OK", Work(4), 0.5) is None
    assert bench.traces.forward("unary", 1.0, "OK", Work(4), 0.5) is None
    bench.chance = 0.05
    assert bench.traces.forward("unary", 1.0, "OK", Work(4), 0.5) is None
    assert bench.traces.forward("stream", 1.0, "LAYOUT_STALE", Work(), 0.0) is not None
    span = bench.spans["Forward"]
    assert span.attributes == {"slotcar.plane": "stream", "slotcar.rows": 0, "error.type": "LAYOUT_STALE"}
    assert "forward.compute" not in bench.spans


def test_an_observation_names_the_trace_that_it_belongs_to(bench: Bench) -> None:
    metrics = Metrics(bench.traces)
    metrics.load_stage("fill", 0.2, DIGEST)
    metrics.forward("unary", 0.2, "OK", Work(1), 0.1)
    assert "# {" not in generate_latest(metrics.registry).decode()
    bench.call(LOAD, [("traceparent", SAMPLED)], lambda: metrics.load_stage("fill", 0.2, DIGEST))
    bench.call(FORWARD, [("traceparent", SAMPLED)], lambda: metrics.forward("unary", 0.2, "OK", Work(1), 0.1))
    exemplars = [line for line in generate_latest(metrics.registry).decode().splitlines() if "# {" in line]
    assert [line.partition("{")[0] for line in exemplars] == [
        "slotcar_forward_seconds_bucket",
        "slotcar_load_stage_seconds_bucket",
    ]
    assert all('le="0.3"' in line and f'trace_id="{TRACE}"' in line for line in exemplars)
