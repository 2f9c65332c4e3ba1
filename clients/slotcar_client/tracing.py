"""The caller's trace, as metadata of each call, if the engine has OpenTelemetry."""

from __future__ import annotations

import functools
import sys
from typing import Any


def trace_metadata() -> tuple[tuple[str, str], ...] | None:
    """W3C's headers of the span that is current here, None where there is none.

    An engine that has not imported the library has no span: then this is a look into a table, and imports nothing.
    """
    if "opentelemetry.trace" not in sys.modules:
        return None
    headers: dict[str, str] = {}
    _propagator().inject(headers)
    return tuple(headers.items()) or None


@functools.cache
def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
