"""The manifests of examples/kubernetes go into one namespace, a restricted one wherever their volumes may be there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.k8s import charts, checks, kustomize

Json = dict[str, Any]
EXAMPLES = sorted(path.stem for path in kustomize.EXAMPLES.iterdir())
DECLARED = "slotcar.dev/adapters"


@pytest.fixture(params=EXAMPLES)
def objects(request: pytest.FixtureRequest) -> list[Json]:
    return kustomize.example(request.param)


def test_engines_are_restricted(objects: list[Json]) -> None:
    for pod in kustomize.pods(objects):
        common = pod["spec"].get("securityContext") or {}
        for _, container in checks.containers(pod):
            container["securityContext"] = common | container.get("securityContext", {})
            assert checks.unrestricted(pod, container) == []


def test_what_a_deployment_asks_for_is_bounded(objects: list[Json]) -> None:
    for deployment in charts.of_kind(objects, "Deployment"):
        for _, container in checks.containers(charts.pod_of(deployment)):
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_adapters_are_declared_in_a_config_map_of_the_example_s_own(objects: list[Json]) -> None:
    maps = {each["metadata"]["name"]: each["data"] for each in charts.of_kind(objects, "ConfigMap")}
    for pod in kustomize.pods(objects):
        name = pod["metadata"].get("annotations", {}).get(DECLARED)
        assert name is None or "adapters.yaml" in maps[name]


def test_no_example_overwrites_another_s_objects() -> None:
    every = [each for name in EXAMPLES for each in kustomize.example(name) if each["kind"] != "Pod"]
    names = Counter((each["kind"], each["metadata"]["name"]) for each in every)
    assert [each for each, count in names.items() if count > 1] == []
    # Nor those of the overlays that are for the engines' namespace.
    theirs = {(each["kind"], each["metadata"]["name"]) for each in kustomize.built("plain-pod")}
    assert names.keys() & theirs == set()
