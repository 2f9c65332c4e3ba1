"""The gRPC server: slotcar's services, health and reflection, over one cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from slotcar.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
    operator_service_pb2,
    operator_service_pb2_grpc,
)

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.reconcile import DesiredStatus
from slotcar_sidecar.rpc.access import Access
from slotcar_sidecar.rpc.adapter_service import AdapterService
from slotcar_sidecar.rpc.engine_service import EngineService, ServerFacts
from slotcar_sidecar.rpc.health import Health, HealthService
from slotcar_sidecar.rpc.interceptors import Count, ErrorInterceptor
from slotcar_sidecar.rpc.operator_service import Operations, OperatorService
from slotcar_sidecar.rpc.tracing import Begin, CallInterceptor

_TRANSPORT_FACTOR = 4
"""A message this many times larger than the server accepts is refused by the transport, without details."""
MAX_METADATA_BYTES = 16 << 10
_CONNECTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # No keepalive is sent while any other ping is unanswered, by default for a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
# Who probes sends a name and wants one answer, or watches the three services there are.
_PROBES = (("grpc.max_receive_message_length", 4096), ("grpc.max_concurrent_streams", 16))


@dataclass(frozen=True, slots=True)
class Serving:
    """How a cache is served: `count` is told how calls end, `desired` has what is declared.

    Without `operations` there is no OperatorService, and without `begin_span` no trace.
    """

    max_message_bytes: int
    heartbeat_seconds: float
    count: Count
    planes: Sequence[str] = ("stream",)
    desired: Callable[[], DesiredStatus] = DesiredStatus
    health: Health = field(default_factory=Health)
    operations: Operations | None = None
    begin_span: Begin | None = None
    access: Access | None = None
    max_streams: int = 1024
    max_watchers: int = 256


def make_server(cache: AdapterCache, serving: Serving) -> aio.Server:
    """A server over `cache` that is not bound or started yet."""
    errors = ErrorInterceptor(serving.max_message_bytes, serving.count, serving.access)
    options = (
        *_CONNECTIONS,
        ("grpc.max_receive_message_length", serving.max_message_bytes * _TRANSPORT_FACTOR),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", serving.max_streams),
    )
    server = aio.server(interceptors=[CallInterceptor(serving.begin_span), errors], options=options)
    facts = ServerFacts(version("slotcar"), serving.max_message_bytes, serving.heartbeat_seconds, tuple(serving.planes))
    adapters = AdapterService(cache, serving.heartbeat_seconds, serving.desired, serving.max_watchers)
    adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server(adapters, server)
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(EngineService(cache, facts, errors), server)
    if serving.operations is not None:
        operators = OperatorService(cache, serving.operations, serving.health)
        operator_service_pb2_grpc.add_OperatorServiceServicer_to_server(operators, server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(serving.health, cache.closing), server)
    names = (
        adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name,
        engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name,
        operator_service_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    return server


def make_health_server(health: Health, closing: asyncio.Event) -> aio.Server:
    """A server of health alone, which ends its watches when `closing` is set; it is not bound or started yet."""
    server = aio.server(options=(*_CONNECTIONS, *_PROBES))
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(health, closing), server)
    return server
