"""The gRPC server: slotcar's services, health and reflection, over one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from slotcar.v1 import adapter_service_pb2, adapter_service_pb2_grpc, engine_service_pb2, engine_service_pb2_grpc

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.reconcile import DesiredStatus
from slotcar_sidecar.rpc.adapter_service import AdapterService
from slotcar_sidecar.rpc.engine_service import EngineService, ServerFacts
from slotcar_sidecar.rpc.health import Health
from slotcar_sidecar.rpc.interceptors import Count, ErrorInterceptor

_TRANSPORT_FACTOR = 4
"""A message this many times larger than the server accepts is refused by the transport, without details."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A server that is not bound or started yet, and its health."""

    server: aio.Server
    health: Health


def make_server(
    cache: AdapterCache,
    max_message_bytes: int,
    heartbeat_seconds: float,
    count: Count,
    planes: Sequence[str] = ("stream",),
    desired: Callable[[], DesiredStatus] = DesiredStatus,
) -> Rpc:
    """A server over `cache` that offers `planes`; `count` is told how calls end, `desired` has what is declared."""
    errors = ErrorInterceptor(max_message_bytes, count)
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes * _TRANSPORT_FACTOR),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # No keepalive is sent while any other ping is unanswered, by default for a minute.
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]
    server = aio.server(interceptors=[errors], options=options)
    facts = ServerFacts(version("slotcar"), max_message_bytes, heartbeat_seconds, tuple(planes))
    adapters = AdapterService(cache, heartbeat_seconds, desired)
    adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server(adapters, server)
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(EngineService(cache, facts, errors), server)
    servicer = Health(cache.closing)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (
        adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name,
        engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    return Rpc(server, servicer)
