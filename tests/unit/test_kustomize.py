"""What the manifests of deploy/kustomize start a sidecar with, and the files that they give it, are what it reads.

The builds are those that tests/k8s compares with what kustomize makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from slotcar_sidecar import cli
from slotcar_sidecar.config import Config
from slotcar_sidecar.core.model import ModelSpec
from slotcar_sidecar.core.site import Site
from slotcar_sidecar.process.policy import parse_policy
from slotcar_sidecar.sync.declaration import declared

REPOSITORY = Path(__file__).resolve().parents[2]
BUILDS = REPOSITORY / "tests" / "k8s" / "golden" / "kustomize"
OVERLAYS = REPOSITORY / "deploy" / "kustomize" / "overlays"
KINDS = ("initContainers", "containers")

# All linear sites of a model with 7 billion parameters: 32 layers of attention, gate and up, and down.
SHAPES = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]
SITES = [Site(f"{layer}.{at}", *shape) for layer in range(32) for at, shape in enumerate(SHAPES)]
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
GIB = 1 << 30

Json = dict[str, Any]


def sidecars(overlay: str) -> Iterator[tuple[Json, Json]]:
    """Each pod's spec with its container of slotcar."""
    for each in yaml.safe_load_all((BUILDS / f"{overlay}.yaml").read_text(encoding="utf-8")):
        spec = each.get("spec", {})
        pod = spec["template"]["spec"] if "template" in spec else spec
        for kind in KINDS:
            yield from ((pod, found) for found in pod.get(kind, ()) if found["name"] == "slotcar")


def config_of(container: Json) -> Config:
    command, *flags = container["args"]
    assert container["command"] == ["slotcar"]
    assert cli.main.commands[command] is cli.serve
    with cli.serve.make_context(command, list(flags)) as context:
        # Folders are the pod's.
        return cli._make_config(context.params | {"root": ()})


def port_of(address: str | None) -> int:
    return int(str(address).rpartition(":")[2])


@pytest.mark.parametrize("overlay", ["plain-pod", "daemonset", "pool"])
def test_every_flag_is_one_of_serve_s_and_its_value_fits(overlay: str) -> None:
    ((pod, container),) = sidecars(overlay)
    config = config_of(container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    named = {"slotcar-metrics": port_of(config.metrics), "slotcar-health": port_of(config.health)}
    assert named.items() <= ports.items()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == ports["slotcar-health"]
    assert config.shutdown_seconds < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("overlay", "rings"), [("plain-pod", 1), ("daemonset", 4), ("pool", 0)])
def test_slots_of_a_large_model_fit_into_the_limit(overlay: str, rings: int) -> None:
    """With full tiers and 0.5 GiB for the process, as the manifests' comments count; below it nothing is killed."""
    ((_, container),) = sidecars(overlay)
    config = config_of(container)
    slots = config.slots * ModelSpec.of(SITES).slot_bytes(config.max_rank, ITEM_BYTES[config.dtype])
    on_its_way_to_the_disk = GIB if config.disk else 0
    needed = slots + config.host_bytes + on_its_way_to_the_disk + rings * config.ring_bytes + GIB // 2
    limit = container["resources"]["limits"]["memory"]
    assert needed <= int(limit.removesuffix("Gi")) * GIB


def test_a_member_serves_over_tls_what_envoy_calls() -> None:
    ((_, container),) = sidecars("pool")
    config = config_of(container)
    (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == "grpc"]
    assert f"tcp://0.0.0.0:{port}" in config.listen
    assert not config.insecure
    assert config.planes == ("stream",)


@pytest.mark.parametrize("file", sorted(OVERLAYS.glob("*/policy.yaml")), ids=lambda path: path.parent.name)
def test_a_policy_is_one(file: Path) -> None:
    policy = parse_policy(file.read_text(encoding="utf-8"), file.name, lambda of: of)
    assert {client.name for client in policy.clients} >= {"operator"}


@pytest.mark.parametrize("file", sorted(OVERLAYS.glob("*/adapters.yaml")), ids=lambda path: path.parent.name)
def test_a_declared_set_is_one(file: Path) -> None:
    found = declared(file.read_text(encoding="utf-8"), file.name)
    assert found.wants
    assert found.malformed == ()
