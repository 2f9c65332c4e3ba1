"""The pieces that a pod gets: the sidecar's container, its volumes, and what the engine's container has of them.

They depend on nothing but their arguments, so that a digest of them tells a second pass whether they are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from slotcar_injector import places
from slotcar_injector.annotations import Request
from slotcar_injector.pod import NATIVE, Target
from slotcar_injector.settings import Settings
from slotcar_injector.shape import Json
from slotcar_injector.values import Named, memory_text, size_flag

# The sidecar must answer within this time of its start, or is started again.
START_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Pieces:
    """What slotcar adds to a pod."""

    target: Target
    container: Json
    volumes: tuple[Json, ...]
    group: int

    @property
    def engine_mount(self) -> Json:
        # To connect to a socket needs no writable mount, and so no container can put another in its place.
        return {"name": places.RUN_VOLUME, "mountPath": places.RUN_PATH, "readOnly": True}

    @property
    def engine_variable(self) -> Json:
        return {"name": places.TARGET_VARIABLE, "value": places.TARGET}

    @property
    def digest(self) -> str:
        """Of everything that is added, and where to."""
        every = [self.target.mode, self.target.containers, self.container, self.volumes, self.group]
        every += [self.engine_mount, self.engine_variable]
        return hashlib.sha256(json.dumps(every, sort_keys=True).encode("ascii")).hexdigest()[:16]


def pieces(request: Request, target: Target, settings: Settings) -> Pieces:
    """What `target` gets."""
    volumes, mounts = zip(*_own_volumes(request), strict=True)
    container: Json = {
        "name": places.CONTAINER,
        "image": request.image,
        "command": ["slotcar"],
        "args": ["serve", *_flags(request, target, settings.bind)],
        "env": [{"name": "HOME", "value": places.TMP_PATH}],
        "ports": [
            {"name": places.METRICS_PORT, "containerPort": request.metrics_port, "protocol": "TCP"},
            {"name": places.HEALTH_PORT, "containerPort": request.health_port, "protocol": "TCP"},
        ],
        **_probes(request.health_port),
        "resources": _resources(request),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": settings.user,
            "runAsGroup": settings.group,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*mounts, *_pod_mounts(request)],
    }
    if target.mode == NATIVE:
        container["restartPolicy"] = "Always"
    return Pieces(target, container, volumes, settings.group)


def _flags(request: Request, target: Target, bind: str) -> Iterator[str]:
    """Each flag of `slotcar serve` with its value, in one argument."""
    host = f"[{bind}]" if ":" in bind else bind
    yield f"--listen={places.TARGET}"
    yield f"--planes={','.join(request.planes)}"
    yield f"--metrics={host}:{request.metrics_port}"
    yield f"--pages={'always' if request.status_page == 'true' else 'never'}"
    yield f"--health={host}:{request.health_port}"
    yield f"--slots={request.slots}"
    yield f"--max-rank={request.max_rank}"
    yield f"--dtype={request.dtype}"
    yield f"--device={'cuda' if request.gpu_claim else 'cpu'}"
    yield f"--host-bytes={size_flag(request.host_bytes.amount)}"
    yield f"--ring-bytes={size_flag(request.ring_bytes.amount)}"
    if request.disk_bytes:
        yield f"--disk={places.DISK_PATH}/tier"
        yield f"--disk-bytes={size_flag(request.disk_bytes.amount)}"
        yield f"--journal={places.DISK_PATH}/journal"
    yield from (f"--root={mount.path}" for mount in request.roots or ())
    yield from (f"--source={source}" for source in request.sources or ())
    if request.uses_hub:
        yield f"--hf-cache={places.HUB_PATH}/hub"
    if request.source_options:
        yield f"--source-options={places.OPTIONS_PATH}/{request.source_options.part}"
    if request.adapters:
        yield f"--adapters={places.ADAPTERS_PATH}/{request.adapters.part}"
    if request.policy:
        yield f"--policy={places.POLICY_PATH}/{request.policy.part}"
    if request.model_spec:
        yield f"--model-spec={places.SPEC_PATH}/{request.model_spec.part}"
    if request.base_model:
        yield f"--base-model={request.base_model.path}"
    # The rest of the grace period is for closing. The kubelet's SIGKILL comes at its end.
    yield f"--shutdown-seconds={max(1, target.grace_seconds - places.MARGIN_SECONDS)}"
    yield f"--log-level={request.log_level}"
    yield f"--log-format={request.log_format}"


def _probes(port: int) -> Json:
    """The kubelet can probe a port only, so the sidecar has one that serves nothing but its health."""

    def probe(service: str, **times: int) -> Json:
        return {"grpc": {"port": port, "service": service}, **times}

    return {
        "startupProbe": probe("liveness", periodSeconds=1, timeoutSeconds=2, failureThreshold=START_SECONDS),
        "readinessProbe": probe("readiness", periodSeconds=5, timeoutSeconds=2, failureThreshold=3),
        "livenessProbe": probe("liveness", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
    }


def _resources(request: Request) -> Json:
    requests, limits = {"cpu": request.cpu_request.text}, {}
    if request.cpu_limit:
        limits["cpu"] = request.cpu_limit.text
    if request.memory_limit:
        limits["memory"] = request.memory_limit.text
    memory = request.memory_request or request.memory_limit
    if memory:
        requests["memory"] = memory.text
    resources: Json = {"requests": requests}
    if limits:
        resources["limits"] = limits
    if request.gpu_claim:
        claim = {"name": request.gpu_claim.name}
        resources["claims"] = [claim | ({"request": request.gpu_claim.part} if request.gpu_claim.part else {})]
    return resources


def _own_volumes(request: Request) -> Iterator[tuple[Json, Json]]:
    """Each volume of the sidecar's own, and how it is mounted."""
    yield _scratch(places.RUN_VOLUME, places.RUN_PATH, places.RUN_BYTES, {"medium": "Memory"})
    yield _scratch(places.TMP_VOLUME, places.TMP_PATH, places.TMP_BYTES)
    if request.disk_bytes:
        size = request.disk_bytes.amount + places.DISK_SPARE_BYTES
        yield _scratch(places.DISK_VOLUME, places.DISK_PATH, size)
    if request.uses_hub:
        yield _scratch(places.HUB_VOLUME, places.HUB_PATH, request.hub_cache_bytes.amount)
    if request.adapters:
        yield _files(places.ADAPTERS_VOLUME, places.ADAPTERS_PATH, _config_map(request.adapters))
    if request.policy:
        yield _files(places.POLICY_VOLUME, places.POLICY_PATH, _config_map(request.policy))
    if request.model_spec:
        yield _files(places.SPEC_VOLUME, places.SPEC_PATH, _config_map(request.model_spec))
    if request.source_options:
        secret = {"secret": {"secretName": request.source_options.name}}
        yield _files(places.OPTIONS_VOLUME, places.OPTIONS_PATH, secret)


def _scratch(name: str, path: str, size: int, more: Json | None = None) -> tuple[Json, Json]:
    empty = {**(more or {}), "sizeLimit": memory_text(size)}
    return {"name": name, "emptyDir": empty}, {"name": name, "mountPath": path}


def _files(name: str, path: str, origin: Json) -> tuple[Json, Json]:
    """The whole folder: a single file of it (subPath) would not follow changes."""
    return {"name": name, **origin}, {"name": name, "mountPath": path, "readOnly": True}


def _config_map(of: Named) -> Json:
    return {"configMap": {"name": of.name}}


def _pod_mounts(request: Request) -> Iterator[Json]:
    for mount in request.mounts:
        part = {"subPath": mount.folder} if mount.folder else {}
        yield {"name": mount.volume, "mountPath": mount.path, "readOnly": True, **part}
