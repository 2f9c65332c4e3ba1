"""What an API server, a kubelet and Pod Security would say of a pod: an empty list for one without fault.

The schemas are Kubernetes' own; `faults` has the rules that schemas do not have; `unrestricted` is what the restricted
Pod Security Standard asks of a container.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from jsonschema.validators import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

Json = dict[str, Any]
VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def check_schemas(of: Json, versions: Iterable[str] = VERSIONS) -> None:
    """Raises jsonschema's ValidationError for the first version whose schema has not all that this object has."""
    group, _, version = of["apiVersion"].rpartition("/")
    parts = (of["kind"].lower(), group.partition(".")[0], version)
    for kubernetes in versions:
        _validator(kubernetes, "-".join(filter(None, parts))).validate(of)


@cache
def _validator(version: str, name: str) -> Draft202012Validator:
    """As kubernetes_validate makes it, strictly; it would read megabytes anew for each object."""
    schema = _schema(version, name)
    registry: Registry[Any] = Resource.from_contents(schema) @ _definitions(version)
    return Draft202012Validator(schema, registry=registry)


@cache
def _definitions(version: str) -> Registry[Any]:
    return Resource.from_contents(_schema(version, "_definitions")) @ Registry()


def _schema(version: str, name: str) -> Any:
    return schema_contents(f"kubernetes-json-schema/v{version}.0-local-strict/{name}.json", version)


def faults(pod: Json) -> list[str]:
    """What breaks rules that are in no schema."""
    spec = pod["spec"]
    volumes = [each["name"] for each in spec.get("volumes") or ()]
    claims = [each["name"] for each in spec.get("resourceClaims") or ()]
    found = [f"volume {name} twice" for name in _twice(volumes)]
    found += [f"volume name {name}" for name in volumes if not _LABEL.fullmatch(name)]
    names = [each["name"] for _, each in containers(pod)]
    found += [f"container {name} twice" for name in _twice(names)]
    for kind, each in containers(pod):
        found += [f"{each['name']}: {fault}" for fault in _of_container(kind, each, volumes, claims)]
    ports = [port["containerPort"] for _, each in containers(pod) for port in each.get("ports") or ()]
    found += [f"port {port} twice" for port in _twice(ports)]
    return found


def containers(pod: Json) -> Iterator[tuple[str, Json]]:
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for each in pod["spec"].get(kind) or ():
            yield kind, each


def named(pod: Json, name: str) -> tuple[str, Json]:
    """The list that the container of this name is in, and the container."""
    ((kind, each),) = [(kind, each) for kind, each in containers(pod) if each["name"] == name]
    return kind, each


def unrestricted(pod: Json, container: Json) -> list[str]:
    """What the restricted Pod Security Standard would refuse in this container, and its volumes."""
    security = container.get("securityContext") or {}
    capabilities = security.get("capabilities") or {}
    wanted = {
        "allowPrivilegeEscalation": security.get("allowPrivilegeEscalation") is False,
        "runAsNonRoot": security.get("runAsNonRoot") is True,
        "runAsUser": security.get("runAsUser") != 0,
        "privileged": not security.get("privileged"),
        "procMount": security.get("procMount") in (None, "Default"),
        "capabilities.drop": capabilities.get("drop") == ["ALL"],
        "capabilities.add": set(capabilities.get("add") or ()) <= {"NET_BIND_SERVICE"},
        "seccompProfile": (security.get("seccompProfile") or {}).get("type") in ("RuntimeDefault", "Localhost"),
        "hostPort": not any(port.get("hostPort") for port in container.get("ports") or ()),
    }
    found = [name for name, is_so in wanted.items() if not is_so]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    own = [each for each in pod["spec"].get("volumes") or () if each["name"].startswith("slotcar-")]
    return found + [f"volume {each['name']}" for each in own if not set(each) - {"name"} <= allowed]


def _of_container(kind: str, container: Json, volumes: list[str], claims: list[str]) -> Iterator[str]:
    if not _LABEL.fullmatch(container["name"]):
        yield "its name is no DNS label"
    mounts = container.get("volumeMounts") or []
    yield from (f"mounts {each['name']}, which is no volume" for each in mounts if each["name"] not in volumes)
    yield from (f"mounts at {path} twice" for path in _twice(each["mountPath"] for each in mounts))
    yield from (f"variable {name} twice" for name in _twice(each["name"] for each in container.get("env") or ()))
    for port in container.get("ports") or ():
        name = port.get("name")
        if name is not None and not _PORT_NAME.fullmatch(name):
            yield f"port name {name}"
    goes_on = kind == "containers" or (kind == "initContainers" and container.get("restartPolicy") == "Always")
    if not goes_on:
        yield from (f"has a {probe}, and ends" for probe in _PROBES if container.get(probe))
    if kind != "initContainers" and "restartPolicy" in container:
        yield "has a restartPolicy"
    for claim in (container.get("resources") or {}).get("claims") or ():
        if claim["name"] not in claims:
            yield f"uses claim {claim['name']}, which the pod has not"


def _twice(values: Iterable[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]
