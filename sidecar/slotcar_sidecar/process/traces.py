"""Sends spans to the collector that the settings name, and ends that in a bounded time."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from slotcar_sidecar.config import Config
from slotcar_sidecar.process.sockets import StartError

if TYPE_CHECKING:
    from slotcar_sidecar.ops.tracing import Traces

__all__ = ["make_traces"]

_CLOSE_SECONDS = 2.0


def make_traces(config: Config, resources: contextlib.ExitStack) -> Traces | None:
    """None without a collector. What it has not taken when `resources` are closed is sent then. Raises StartError."""
    if config.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from slotcar_sidecar.ops.tracing import Traces, make_provider
    except ImportError as error:
        wanted = "OpenTelemetry, which is not here: install slotcar[otel]"
        raise StartError(f"--otlp-endpoint {config.otlp_endpoint} needs {wanted}") from error
    exporter = OTLPSpanExporter(config.otlp_endpoint, insecure=config.otlp_endpoint.startswith("http:"))
    # Bounded, and in a thread of its own: what a slow collector has no room for is dropped.
    processor = BatchSpanProcessor(exporter)
    provider = make_provider(version("slotcar"), processor)

    def close() -> None:
        """A collector that hangs, or is not there, has its calls ended."""
        closing = threading.Thread(target=processor.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            exporter.shutdown()

    resources.callback(close)
    tracer = provider.get_tracer("slotcar", version("slotcar"))
    return Traces(tracer, config.trace_sample, random.Random().random, time.time_ns)  # noqa: S311
