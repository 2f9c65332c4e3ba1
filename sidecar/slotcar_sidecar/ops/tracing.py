"""Spans of RPCs, and of the parts of loads, mappings and Forwards, by OpenTelemetry.

Invariant: a call whose caller has a trace is traced exactly if the caller's part of it is. Of the others, those that
change what is where are, and of Forwards a share. What has no span costs no more than the look whether it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import context as contexts
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from slotcar_sidecar.core.call import CALL
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.tally import Work
from slotcar_sidecar.ops import logs
from slotcar_sidecar.ops.spans import Exemplar

Headers = Sequence[tuple[str, str | bytes]]

_MOST_ATTRIBUTE_CHARACTERS = 256
_ALWAYS = frozenset(
    {"LoadAdapter", "LoadAdapterStream", "UnloadAdapter", "PrefetchAdapters", "HoldAdapter", "SetMapping"}
)
_HEADERS = ("traceparent", "tracestate")
_propagator = TraceContextTextMapPropagator()


def make_provider(version: str, processor: SpanProcessor) -> TracerProvider:
    """Gives `processor` each span that ends. Whether there is one is decided in `Traces`; the end is the caller's."""
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource.create({"service.name": "slotcar", "service.version": version}),
        span_limits=SpanLimits(max_attribute_length=_MOST_ATTRIBUTE_CHARACTERS),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return provider


@dataclass(frozen=True, slots=True)
class CallSpan:
    """The span of an RPC, if it has one; `trace` is also its caller's alone."""

    trace: str = ""
    span: Span | None = None

    @property
    def span_id(self) -> str:
        return format_span_id(self.span.get_span_context().span_id) if self.span is not None else ""

    def end(self, code: str, reason: str) -> None:
        """`code` is gRPC's name of how the call ended, `reason` the row of the error table, "" for none."""
        if self.span is None:
            return
        known = logs.context()
        self.span.set_attribute("rpc.response.status_code", code)
        for name in ("epoch", "caller"):
            if name in known:
                self.span.set_attribute(f"slotcar.{name}", known[name])
        if code != "OK":
            _fail(self.span, reason or code)
        self.span.end()


_UNTRACED = CallSpan()


class Traces:
    """`share` of the Forwards without a traced caller have spans; `random` is in [0, 1), `time_ns` in Unix time."""

    def __init__(self, tracer: Tracer, share: float, random: Callable[[], float], time_ns: Callable[[], int]) -> None:
        self._tracer = tracer
        self._share = share
        self._random = random
        self._time_ns = time_ns

    def begin(self, method: str, headers: Headers, ref: str) -> CallSpan:
        """The RPC's span, which is the current one from now on: the context is the RPC's own.

        `method` is "slotcar.v1.AdapterService/LoadAdapter", `ref` the adapter that it is about, if any.
        """
        parent = _parent(headers)
        if parent is None:
            if not self._begins(method.rpartition("/")[2]):
                return _UNTRACED
        elif not (above := get_current_span(parent).get_span_context()).trace_flags.sampled:
            return CallSpan(format_trace_id(above.trace_id))
        attributes = {"rpc.system.name": "grpc", "rpc.method": method}
        if ref:
            attributes["slotcar.ref"] = ref
        span = self._tracer.start_span(method, parent or contexts.Context(), SpanKind.SERVER, attributes)
        contexts.attach(set_span_in_context(span))
        return CallSpan(format_trace_id(span.get_span_context().trace_id), span)

    def _begins(self, name: str) -> bool:
        return name in _ALWAYS or (name == "Forward" and self._random() < self._share)

    # As ops.spans.Spans

    def load_stage(self, stage: str, seconds: float, digest: Digest) -> Exemplar:
        return self._part(f"load.{stage}", seconds, {"slotcar.digest": str(digest)})

    def mapping_waited(self, seconds: float) -> Exemplar:
        return self._part("mapping.wait", seconds, {})

    def forward(self, plane: str, seconds: float, reason: str, work: Work, queue_seconds: float) -> Exemplar:
        """A Forward of a stream or ring is no RPC: its span is a root of its own."""
        call = CALL.get()
        if call.span:
            self._forward_parts(contexts.get_current(), seconds, reason, queue_seconds)
            return call.exemplar
        if plane == "unary" or self._random() >= self._share:
            return None
        end = self._time_ns()
        attributes: dict[str, str | int] = {"slotcar.plane": plane, "slotcar.rows": work.rows}
        start = end - _nanos(seconds)
        span = self._tracer.start_span("Forward", contexts.Context(), attributes=attributes, start_time=start)
        self._forward_parts(set_span_in_context(span, contexts.Context()), seconds, reason, queue_seconds)
        if reason != "OK":
            _fail(span, reason)
        span.end(end)
        return _exemplar(span)

    def _forward_parts(self, under: contexts.Context, seconds: float, reason: str, queue_seconds: float) -> None:
        if reason != "OK":
            return
        end = self._time_ns()
        begun, queued = end - _nanos(seconds), end - _nanos(seconds - queue_seconds)
        self._tracer.start_span("forward.queue", under, start_time=begun).end(queued)
        self._tracer.start_span("forward.compute", under, start_time=queued).end(end)

    def _part(self, name: str, seconds: float, attributes: Mapping[str, str]) -> Exemplar:
        """A part of the call of now, which took `seconds` until now."""
        if not CALL.get().span:
            return None
        end = self._time_ns()
        span = self._tracer.start_span(name, attributes=attributes, start_time=end - _nanos(seconds))
        span.end(end)
        return _exemplar(span)


def _parent(headers: Headers) -> contexts.Context | None:
    """What the caller says of its trace, by W3C's rules; anything else is as if nothing were said."""
    found = [(key, value) for key, value in headers if key in _HEADERS]
    said = {key: value for key, value in found if isinstance(value, str)}
    if not found or len(said) < len(found):  # one is there twice, or is no text
        return None
    parent = _propagator.extract(said, contexts.Context())
    return parent if get_current_span(parent).get_span_context().is_valid else None


def _fail(span: Span, reason: str) -> None:
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, reason))


def _exemplar(span: Span) -> Exemplar:
    context = span.get_span_context()
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}


def _nanos(seconds: float) -> int:
    return int(seconds * 1e9)
