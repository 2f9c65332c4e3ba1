"""Puts the pieces into a pod, on the first pass and on any later one.

Invariant: what is already there by its name, put there by a pass with the same digest, is left as it is, because
others may have changed it for good reasons (a registry's mirror, defaults); what is missing is put back. After a change
of what is asked for, everything of before is taken out first.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from slotcar_injector import places
from slotcar_injector.denial import Reason
from slotcar_injector.pod import CONTAINER_LISTS, NATIVE
from slotcar_injector.shape import Json, field, items
from slotcar_injector.sidecar import Pieces
from slotcar_injector.status import Status, status_of


def place(pod: Json, pieces: Pieces, version: str) -> tuple[Json, Reason]:
    """The pod with the pieces in it, and what that came to: NEW, COMPLETE (nothing changed), HEALED or REPLACED."""
    status = status_of(pod)
    if status and status.digest == pieces.digest and not _is_elsewhere(pod, pieces):
        placed = _with(pod, pieces)
        return placed, Reason.COMPLETE if placed == pod else Reason.HEALED
    placed = _with(without(pod) if status else pod, pieces)
    target = pieces.target
    text = Status(version, pieces.digest, target.mode, target.engine).text()
    placed["metadata"]["annotations"] = field(placed["metadata"], "annotations") | {places.STATUS: text}
    return placed, Reason.REPLACED if status else Reason.NEW


def without(pod: Json) -> Json:
    """The pod without anything of slotcar's; supplemental groups stay, as nobody can tell whose they are."""
    bare = deepcopy(pod)
    spec = bare["spec"]
    for kind in CONTAINER_LISTS[:2]:
        _keep(spec, kind, lambda container: container["name"] != places.CONTAINER)
    _keep(spec, "volumes", lambda volume: volume["name"] not in places.VOLUMES)
    for kind in CONTAINER_LISTS:
        for container in items(spec, kind):
            _keep(container, "volumeMounts", lambda mount: mount["name"] not in places.VOLUMES)
            _keep(
                container,
                "env",
                lambda each: (each["name"], each.get("value")) != (places.TARGET_VARIABLE, places.TARGET),
            )
    annotations = bare["metadata"]["annotations"]
    del annotations[places.STATUS]
    if places.EVICTABLE in annotations:
        kept = [name for name in _evictable(annotations) if name not in places.VOLUMES]
        annotations |= {places.EVICTABLE: ",".join(kept)}
        if not kept:
            del annotations[places.EVICTABLE]
    return bare


def _with(pod: Json, pieces: Pieces) -> Json:
    placed = deepcopy(pod)
    placed["metadata"] = metadata = field(placed, "metadata")
    spec = placed["spec"]
    metadata["labels"] = {places.METRICS_LABEL: "true"} | field(metadata, "labels")
    _let_evict(metadata, pieces)
    _place_container(spec, pieces)
    for volume in pieces.volumes:
        if volume["name"] not in _names(items(spec, "volumes")):
            spec["volumes"] = [*items(spec, "volumes"), volume]
    for kind in CONTAINER_LISTS[:2]:
        for container in items(spec, kind):
            if container["name"] in pieces.target.containers:
                _give_socket(container, pieces)
    security = dict(field(spec, "securityContext"))
    groups = security.get("supplementalGroups") or []
    if pieces.group not in groups:
        spec["securityContext"] = security | {"supplementalGroups": [*groups, pieces.group]}
    return placed


def _let_evict(metadata: Json, pieces: Pieces) -> None:
    """Without the annotation the cluster autoscaler keeps the node of a pod that has volumes of the node's."""
    annotations = field(metadata, "annotations")
    listed = _evictable(annotations)
    missing = [each["name"] for each in pieces.volumes if "emptyDir" in each and each["name"] not in listed]
    if missing:
        metadata["annotations"] = annotations | {places.EVICTABLE: ",".join([*listed, *missing])}


def _evictable(annotations: Json) -> list[str]:
    """The names of volumes, as the pod's author wrote them."""
    return [name for name in annotations.get(places.EVICTABLE, "").split(",") if name]


def _place_container(spec: Json, pieces: Pieces) -> None:
    """First of the init containers, or last of those beside the engine, whose number nobody's habits depend on."""
    kind = "initContainers" if pieces.target.mode == NATIVE else "containers"
    there = items(spec, kind)
    names = _names(there)
    if places.CONTAINER not in names:
        spec[kind] = [pieces.container, *there] if pieces.target.mode == NATIVE else [*there, pieces.container]
        return
    own = names.index(places.CONTAINER)
    # Another webhook's may be before it, but none that needs it.
    if any(name in pieces.target.init_containers for name in names[:own]):
        spec[kind] = [there[own], *there[:own], *there[own + 1 :]]


def _give_socket(container: Json, pieces: Pieces) -> None:
    mounts, variables = items(container, "volumeMounts"), items(container, "env")
    if places.RUN_VOLUME not in _names(mounts):
        container["volumeMounts"] = [*mounts, pieces.engine_mount]
    if places.TARGET_VARIABLE not in _names(variables):
        # Before the others, which may refer to it.
        container["env"] = [pieces.engine_variable, *variables]


def _names(every: list[Json]) -> list[str]:
    return [each["name"] for each in every]


def _keep(parent: Json, name: str, wanted: Callable[[Json], bool]) -> None:
    there = items(parent, name)
    kept = [each for each in there if wanted(each)]
    if len(kept) < len(there):
        parent[name] = kept


def _is_elsewhere(pod: Json, pieces: Pieces) -> bool:
    """Whether a container of the sidecar's name is in the list where it does not belong."""
    kind = "containers" if pieces.target.mode == NATIVE else "initContainers"
    return places.CONTAINER in _names(items(pod["spec"], kind))
