"""What a pod is that asks for slotcar, and whether it can have it: the engine's container, the mode, or Denied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slotcar_injector import places
from slotcar_injector.annotations import Request
from slotcar_injector.denial import Denied, Reason
from slotcar_injector.places import CONTAINER, PREFIX
from slotcar_injector.shape import Json, field, items
from slotcar_injector.status import status_of

DEFAULT_GRACE_SECONDS = 30
# Kubernetes' first version whose kubelets know init containers that go on, without a feature gate.
NATIVE_SINCE = (1, 29)
# The first in which resource claims are stable.
CLAIMS_SINCE = (1, 34)
CONTAINER_LISTS = ("initContainers", "containers", "ephemeralContainers")

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

NATIVE, BESIDE = "native", "container"


@dataclass(frozen=True, slots=True)
class Target:
    """The engine's container, those that get the socket with it, how the sidecar runs, and the pod's grace period."""

    engine: str
    init_containers: tuple[str, ...]
    mode: str
    grace_seconds: int

    @property
    def containers(self) -> tuple[str, ...]:
        return (*self.init_containers, self.engine)


def target_of(pod: Json, request: Request, version: tuple[int, int] | None) -> Target:
    """Where the sidecar goes in `pod`, on a cluster of this version, if it is known. Raises Denied."""
    spec = field(pod, "spec")
    _check_windows(spec)
    engine = _engine(pod, request)
    mode = _mode(request, version)
    init_containers = request.init_containers or ()
    if init_containers and mode == BESIDE:
        found = f"annotation {PREFIX}init-containers needs mode native: else they end before slotcar starts"
        raise Denied(Reason.MODE_UNFIT, found)
    for name in init_containers:
        _named(items(spec, "initContainers"), name, "init-containers")
    _check_volumes(spec, request)
    _check_claim(spec, request)
    grace = spec.get("terminationGracePeriodSeconds")
    return Target(engine, init_containers, mode, DEFAULT_GRACE_SECONDS if grace is None else grace)


def check_names(pod: Json, request: Request, target: Target) -> None:
    """Raises Denied where the pod, without what slotcar adds, already has what would be slotcar's."""
    spec = field(pod, "spec")
    for kind, container in _containers(spec):
        if container["name"] == CONTAINER:
            raise _taken(f"spec.{kind} has a container {CONTAINER}")
        for port in items(container, "ports"):
            if port.get("name") in (places.METRICS_PORT, places.HEALTH_PORT):
                raise _taken(f"container {container['name']} has a port {port['name']}")
    for volume in items(spec, "volumes"):
        if volume["name"] in places.VOLUMES:
            raise _taken(f"spec.volumes has a volume {volume['name']}")
    check_ports(pod, request)
    check_engine(pod, target)


def check_ports(pod: Json, request: Request) -> None:
    """Raises Denied where another container has one of the sidecar's ports: all of a pod share them."""
    wanted = {request.metrics_port: "metrics-port", request.health_port: "health-port"}
    for _, container in _containers(field(pod, "spec")):
        for port in items(container, "ports"):
            number = port["containerPort"]
            if container["name"] != CONTAINER and number in wanted and port.get("protocol") in (None, "TCP"):
                raise Denied(
                    Reason.PORT_TAKEN,
                    f"annotation {PREFIX}{wanted[number]} is {number}, which container {container['name']} has: give "
                    "another",
                )


def check_engine(pod: Json, target: Target) -> None:
    """Raises Denied where a container that is to get the socket has another thing in its place."""
    for _, container in _containers(field(pod, "spec")):
        if container["name"] not in target.containers:
            continue
        for mount in items(container, "volumeMounts"):
            if mount["mountPath"].rstrip("/") == places.RUN_PATH and mount["name"] != places.RUN_VOLUME:
                raise _taken(f"container {container['name']} has volume {mount['name']} at {places.RUN_PATH}")
        for variable in items(container, "env"):
            if variable["name"] == places.TARGET_VARIABLE and variable.get("value") != places.TARGET:
                found = variable.get("value") or "from elsewhere"
                wanted = f"wanted {places.TARGET}, or none"
                raise _taken(f"container {container['name']} has {places.TARGET_VARIABLE} {found[:200]}, {wanted}")


def warnings_of(pod: Json, request: Request, target: Target) -> list[str]:
    """What works, but perhaps not as its author thinks; shown by kubectl."""
    spec = field(pod, "spec")
    found = []
    if request.memory_limit is None:
        found.append("slotcar has no memory limit: set slotcar.dev/memory-limit, or it can take the node's memory")
    if not (request.roots or request.sources):
        found.append("neither slotcar.dev/roots nor slotcar.dev/sources: only uploaded adapters can be loaded")
    if spec.get("hostNetwork"):
        ports = f"{request.metrics_port} and {request.health_port}"
        found.append(f"hostNetwork: ports {ports} of slotcar are the node's; two such pods on a node conflict")
    owners = [owner.get("kind") for owner in items(field(pod, "metadata"), "ownerReferences")]
    ends = "Job" in owners or spec.get("restartPolicy") in ("Never", "OnFailure")
    if ends and target.mode == BESIDE:
        found.append("mode container in a pod that is to end: slotcar runs on, and the Job never completes")
    if target.grace_seconds < places.MARGIN_SECONDS * 2:
        found.append(f"terminationGracePeriodSeconds is {target.grace_seconds}: little time for requests to end")
    claim = request.gpu_claim
    if claim and not _uses_claim(spec, target.engine, claim.name):
        found.append(f"container {target.engine} does not use claim {claim.name}: it is on another GPU, or on none")
    return found


def _containers(spec: Json) -> Iterator[tuple[str, Json]]:
    for kind in CONTAINER_LISTS:
        for container in items(spec, kind):
            yield kind, container


def _engine(pod: Json, request: Request) -> str:
    """The container that is said to be the engine's, or is the only one, or is kubectl's default.

    A second pass takes the first one's, though others may have come since.
    """
    spec = field(pod, "spec")
    if request.container is not None:
        _named(items(spec, "containers"), request.container, "container")
        return request.container
    names = [str(each["name"]) for each in items(spec, "containers") if each["name"] != CONTAINER]
    status = status_of(pod)
    default = field(field(pod, "metadata"), "annotations").get(DEFAULT_CONTAINER)
    for name in (status and status.container, names[0] if len(names) == 1 else None, default):
        if name in names:
            return str(name)
    raise Denied(
        Reason.CONTAINER_AMBIGUOUS,
        f"annotation {PREFIX}container is missing, wanted the engine's: one of {', '.join(names) or '(none)'}",
    )


def _mode(request: Request, version: tuple[int, int] | None) -> str:
    """Native or beside; denied with what else the cluster is too old for."""
    mode = request.mode
    if mode == "auto":
        mode = NATIVE if version is None or version >= NATIVE_SINCE else BESIDE
    for is_so, since, what in (
        (mode == NATIVE, NATIVE_SINCE, "mode native"),
        (request.gpu_claim is not None, CLAIMS_SINCE, "gpu-claim"),
    ):
        if is_so and version is not None and version < since:
            found, wanted = (".".join(map(str, each)) for each in (version, since))
            raise Denied(Reason.VERSION_TOO_OLD, f"Kubernetes is {found}, wanted {wanted} for {PREFIX}{what}")
    return mode


def _named(containers: list[Json], name: str, annotation: str) -> None:
    names = [each["name"] for each in containers if each["name"] != CONTAINER]
    if name not in names:
        wanted = f"one of {', '.join(names)}" if names else "none, as the pod has no such containers"
        raise Denied(Reason.CONTAINER_NOT_FOUND, f"annotation {PREFIX}{annotation} is {name}, wanted {wanted}")


def _check_windows(spec: Json) -> None:
    for found, path in (
        (field(spec, "os").get("name"), "spec.os.name"),
        (field(spec, "nodeSelector").get("kubernetes.io/os"), "spec.nodeSelector[kubernetes.io/os]"),
    ):
        if found == "windows":
            raise Denied(Reason.WINDOWS, f"{path} is windows, wanted linux: slotcar has no other images")


def _check_volumes(spec: Json, request: Request) -> None:
    names = [each["name"] for each in items(spec, "volumes") if each["name"] not in places.VOLUMES]
    for annotation, mounts in (("roots", request.roots or ()), ("base-model", (request.base_model,))):
        for mount in mounts:
            if mount and mount.volume not in names:
                wanted = f"one of the pod's volumes ({', '.join(names) or 'it has none'})"
                raise Denied(
                    Reason.VOLUME_NOT_FOUND,
                    f"annotation {PREFIX}{annotation} has volume {mount.volume}, wanted {wanted}",
                )


def _check_claim(spec: Json, request: Request) -> None:
    claims = [each["name"] for each in items(spec, "resourceClaims")]
    if request.gpu_claim and request.gpu_claim.name not in claims:
        wanted = f"one of the pod's resourceClaims ({', '.join(claims) or 'it has none'})"
        found = f"annotation {PREFIX}gpu-claim is {request.gpu_claim.name}"
        raise Denied(Reason.CLAIM_NOT_FOUND, f"{found}, wanted {wanted}")


def _uses_claim(spec: Json, engine: str, claim: str) -> bool:
    return any(
        each["name"] == claim
        for container in items(spec, "containers")
        if container["name"] == engine
        for each in items(field(container, "resources"), "claims")
    )


def _taken(found: str) -> Denied:
    return Denied(Reason.NAME_TAKEN, f"{found}: the name is slotcar's in a pod with label {places.LABEL}")
