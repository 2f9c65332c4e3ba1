"""A collector of traces: a gRPC server that takes OTLP and keeps the spans."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

PATIENCE_SECONDS = 30.0


class Taken(NamedTuple):
    """A span as it arrived; ids in hexadecimal, `parent` "" for a root, `error` "" for none."""

    name: str
    trace: str
    span: str
    parent: str
    seconds: float
    attributes: dict[str, Any]
    error: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """At `endpoint` while it is open. A `hanging` one takes connections and calls, and answers none."""

    def __init__(self, *, hanging: bool = False) -> None:
        self._answers = threading.Event()
        if not hanging:
            self._answers.set()
        self._arrived = threading.Condition()
        self.spans: list[Taken] = []
        self.resources: list[dict[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        self.asked = threading.Event()

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        self.asked.set()
        self._answers.wait(PATIENCE_SECONDS)
        with self._arrived:
            for group in request.resource_spans:
                self.resources.append(_plain(group.resource.attributes))
                self.spans += (_taken(span) for scope in group.scope_spans for span in scope.spans)
            self._arrived.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait(self, name: str, **wanted: str) -> Taken:
        """The first span of that name with these fields, once it has come."""

        def found() -> Taken | None:
            like = (span for span in self.spans if span.name == name)
            return next((s for s in like if all(getattr(s, key) == value for key, value in wanted.items())), None)

        with self._arrived:
            span = self._arrived.wait_for(found, PATIENCE_SECONDS)
        assert span is not None, f"no {name} {wanted} among {[each.name for each in self.spans]}"
        return span

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answers.set()
        self._server.stop(None).wait()


def _taken(span: Any) -> Taken:
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    return Taken(span.name, *ids, seconds, _plain(span.attributes), span.status.message)


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
