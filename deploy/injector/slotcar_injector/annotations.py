"""What a pod asks for: its annotations under slotcar.dev/, all known, each read exactly, or Denied by name.

ANNOTATIONS is the one list of them; docs/kubernetes.md has its table from here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slotcar_injector import values
from slotcar_injector.denial import Denied, Reason
from slotcar_injector.places import PREFIX, PROCESS_BYTES, RESERVED_PATHS, RUN_BYTES, STATUS
from slotcar_injector.values import Mount, Named, Parse, Quantity, Unfit


@dataclass(frozen=True, slots=True)
class Annotation:
    """One annotation: how it is read, what is wanted, what counts without it, and what it does."""

    name: str
    parse: Parse
    wanted: str
    default: str | None
    text: str

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


_BYTES = "a quantity of bytes, such as 512Mi or 4Gi"
_CPU = "a quantity of CPU, such as 500m or 2"
_MOUNT = "VOLUME:/path or VOLUME/folder:/path, of a volume of the pod"

ANNOTATIONS = (
    Annotation(
        "inject", values.choice("true", "false"), "true or false", "true", "`false` leaves a labelled pod alone."
    ),
    Annotation(
        "container",
        values.container_name,
        "the name of a container",
        None,
        "The engine: the container that gets the socket and `SLOTCAR_TARGET`. Needed where there are several.",
    ),
    Annotation(
        "init-containers",
        values.several(values.container_name),
        "names of init containers, with commas between",
        None,
        "Init containers that get the socket too. They start after slotcar; not in mode `container`.",
    ),
    Annotation(
        "mode",
        values.choice("auto", "native", "container"),
        "auto, native or container",
        "auto",
        "`native`: an init container that goes on (Kubernetes 1.29). `container`: one beside the engine. `auto`: "
        "native where the cluster has it.",
    ),
    Annotation("image", values.image, "the reference of an image", None, "Image of slotcar."),
    Annotation("slots", values.number(1, 4096), "a number from 1 to 4096", "8", "Number of adapter slots."),
    Annotation("max-rank", values.number(1, 65536), "a number from 1 to 65536", "64", "Largest LoRA rank at any site."),
    Annotation(
        "dtype",
        values.choice("float32", "float16", "bfloat16"),
        "float32, float16 or bfloat16",
        "float32",
        "Element type of the slots.",
    ),
    Annotation(
        "planes",
        values.several(values.choice("stream", "ring", "direct")),
        "some of stream, ring and direct, with commas between",
        "stream,ring,direct",
        "How tensors may travel; stream is among them.",
    ),
    Annotation(
        "gpu-claim",
        values.claim,
        "CLAIM or CLAIM/REQUEST of the pod's resourceClaims",
        None,
        "Joins a ResourceClaim that the pod has, and puts the slots on its GPU. slotcar never asks for a device of its "
        "own.",
    ),
    Annotation("host-bytes", values.memory, _BYTES, "1Gi", "Size of the host tier."),
    Annotation("disk-bytes", values.memory, _BYTES, None, "Size of the disk tier; none without it."),
    Annotation("ring-bytes", values.memory, _BYTES, "256Mi", "Most shared memory of one ring."),
    Annotation(
        "roots",
        values.several(values.mount),
        _MOUNT + "; several with commas between",
        None,
        "Folders that adapters may be loaded from, mounted for reading.",
    ),
    Annotation(
        "sources",
        values.several(values.source),
        "places such as hf://org/* or s3://bucket/prefix, with commas between",
        None,
        "Remote places that adapters may be loaded from.",
    ),
    Annotation(
        "source-options",
        values.object_key("options.json"),
        "SECRET or SECRET/KEY",
        None,
        "Secret with the file of `--source-options`; its key is `options.json`.",
    ),
    Annotation(
        "hub-cache-bytes",
        values.memory,
        _BYTES,
        "32Gi",
        "Size of the volume of the cache of `hf://`, if it is a source.",
    ),
    Annotation(
        "adapters",
        values.object_key("adapters.yaml"),
        "CONFIGMAP or CONFIGMAP/KEY",
        None,
        "ConfigMap with the adapters that must be there; its key is `adapters.yaml`. Followed while it changes.",
    ),
    Annotation(
        "policy",
        values.object_key("policy.yaml"),
        "CONFIGMAP or CONFIGMAP/KEY",
        None,
        "ConfigMap with the policy of who may do what; its key is `policy.yaml`. Followed while it changes.",
    ),
    Annotation(
        "model-spec",
        values.object_key("model-spec.json"),
        "CONFIGMAP or CONFIGMAP/KEY",
        None,
        "ConfigMap with the base model's sites; its key is `model-spec.json`. Without it the first session's count.",
    ),
    Annotation("base-model", values.mount, _MOUNT, None, "Hugging Face folder of the base model, mounted for reading."),
    Annotation("cpu-request", values.cpu, _CPU, "100m", "CPU that the sidecar requests."),
    Annotation("cpu-limit", values.cpu, _CPU, None, "Its limit; none without it."),
    Annotation(
        "memory-request", values.memory, _BYTES, None, "Memory that the sidecar requests; the limit if there is one."
    ),
    Annotation(
        "memory-limit",
        values.memory,
        _BYTES,
        None,
        "Its limit, with host tier, ring, sockets and 512Mi for the process in it; add what the slots take.",
    ),
    Annotation("metrics-port", values.number(1024, 65535), "a port from 1024 to 65535", "9464", "Port of `/metrics`."),
    Annotation(
        "health-port",
        values.number(1024, 65535),
        "a port from 1024 to 65535",
        "9465",
        "Port of gRPC health, for probes.",
    ),
    Annotation(
        "status-page",
        values.choice("true", "false"),
        "true or false",
        "false",
        "`true` serves the status page beside `/metrics`, to whoever reaches the pod.",
    ),
    Annotation(
        "log-level",
        values.choice("debug", "info", "warning", "error"),
        "debug, info, warning or error",
        "info",
        "Least level of its log lines.",
    ),
    Annotation("log-format", values.choice("json", "human"), "json or human", "json", "How log lines look."),
)
_BY_NAME = {annotation.name: annotation for annotation in ANNOTATIONS}


@dataclass(frozen=True, slots=True)
class Request:
    """What a pod asks for; a field for each annotation."""

    inject: str
    container: str | None
    init_containers: tuple[str, ...] | None
    mode: str
    image: str
    slots: int
    max_rank: int
    dtype: str
    planes: tuple[str, ...]
    gpu_claim: Named | None
    host_bytes: Quantity
    disk_bytes: Quantity | None
    ring_bytes: Quantity
    roots: tuple[Mount, ...] | None
    sources: tuple[str, ...] | None
    source_options: Named | None
    hub_cache_bytes: Quantity
    adapters: Named | None
    policy: Named | None
    model_spec: Named | None
    base_model: Mount | None
    cpu_request: Quantity
    cpu_limit: Quantity | None
    memory_request: Quantity | None
    memory_limit: Quantity | None
    metrics_port: int
    health_port: int
    status_page: str
    log_level: str
    log_format: str

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """The pod's volumes that the sidecar reads, each once."""
        every = (*(self.roots or ()), *((self.base_model,) if self.base_model else ()))
        return tuple(dict.fromkeys(every))

    @property
    def uses_hub(self) -> bool:
        return any(source.startswith("hf://") for source in self.sources or ())

    @property
    def least_memory_bytes(self) -> int:
        """What the memory limit must have room for, apart from the slots."""
        ring = self.ring_bytes.amount if "ring" in self.planes else 0
        return self.host_bytes.amount + ring + RUN_BYTES + PROCESS_BYTES


def request_of(annotations: Mapping[str, str], defaults: Mapping[str, str]) -> Request:
    """What these annotations ask for, with `defaults` (names without the prefix) where they say nothing.

    Raises Denied for the first that is unknown, unfit, missing, or contradicts another.
    """
    given = {
        name.removeprefix(PREFIX): text
        for name, text in sorted(annotations.items())
        if name.startswith(PREFIX) and name != STATUS
    }
    for name in given:
        if name not in _BY_NAME:
            raise Denied(Reason.ANNOTATION_UNKNOWN, _unknown(name))
    fields = {each.field: _value(each, given, defaults) for each in ANNOTATIONS}
    if fields["image"] is None:
        raise Denied(Reason.ANNOTATION_MISSING, f"annotation {PREFIX}image is missing, and the injector has no default")
    request = Request(**fields)
    _check(request)
    return request


def check_default(name: str, text: str) -> None:
    """Raises Denied unless an annotation of this name can have this value."""
    if name not in _BY_NAME:
        raise Denied(Reason.ANNOTATION_UNKNOWN, _unknown(name))
    _value(_BY_NAME[name], {name: text}, {})


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, _BY_NAME, n=1)
    hint = f"; did you mean {PREFIX}{near[0]}?" if near else f"; wanted one of {', '.join(sorted(_BY_NAME))}"
    return f"annotation {PREFIX}{name[:100]} is unknown{hint}"


def _value(annotation: Annotation, given: Mapping[str, str], defaults: Mapping[str, str]) -> Any:
    text = given.get(annotation.name, defaults.get(annotation.name, annotation.default))
    if text is None:
        return None
    try:
        return annotation.parse(text)
    except Unfit:
        raise _unfit(annotation.name, repr(text[:100]), annotation.wanted) from None


def _unfit(name: str, found: str, wanted: str) -> Denied:
    return Denied(Reason.ANNOTATION_INVALID, f"annotation {PREFIX}{name} is {found}, wanted {wanted}")


def _check(request: Request) -> None:
    """Raises Denied for values that do not go together."""
    if "stream" not in request.planes:
        raise _unfit("planes", ",".join(request.planes), "stream among them")
    if request.metrics_port == request.health_port:
        raise _unfit("health-port", str(request.health_port), "another port than metrics-port")
    for what in ("cpu", "memory"):
        least, most = getattr(request, f"{what}_request"), getattr(request, f"{what}_limit")
        if least and most and least.amount > most.amount:
            raise _unfit(f"{what}-request", least.text, f"at most {what}-limit, {most.text}")
    paths = [mount.path for mount in request.mounts]
    for mount in request.mounts:
        if paths.count(mount.path) > 1:
            raise _unfit("roots", mount.path, "a path for each volume")
        if any(_is_beneath(mount.path, taken) or _is_beneath(taken, mount.path) for taken in RESERVED_PATHS):
            raise _unfit("roots", mount.path, f"a path apart from {', '.join(RESERVED_PATHS)}")
    limit = request.memory_limit
    if limit and limit.amount < request.least_memory_bytes:
        least_text = values.memory_text(request.least_memory_bytes)
        raise Denied(
            Reason.MEMORY_TOO_SMALL,
            f"annotation {PREFIX}memory-limit is {limit.text}, wanted at least {least_text} (host-bytes, ring-bytes, "
            f"{RUN_BYTES >> 20}Mi for sockets, {PROCESS_BYTES >> 20}Mi for the process), and what the slots take",
        )


def _is_beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")
