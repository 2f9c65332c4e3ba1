"""Whether what should be a pod has a pod's shape, as far as this package looks: after it, fields are what they seem.

An API server checks all of this before it asks a webhook; anybody else may send anything.
"""

from __future__ import annotations

from typing import Any

from slotcar_injector.denial import BadReview

Json = dict[str, Any]


def check_pod(pod: object) -> Json:
    """The pod. Raises BadReview for the first field that is not of its kind."""
    pod = _object(pod, "object")
    _check_metadata(_field(pod, "metadata"))
    spec = _field(pod, "spec")
    for name in ("containers", "initContainers", "ephemeralContainers"):
        for container in _objects(spec, name):
            _check_container(container)
    for name in ("volumes", "resourceClaims"):
        for each in _objects(spec, name):
            _text(each, "name")
    groups = _field(spec, "securityContext").get("supplementalGroups")
    if groups is not None and not (isinstance(groups, list) and all(_is_number(group) for group in groups)):
        raise BadReview("spec.securityContext.supplementalGroups is no list of numbers")
    _number(spec, "terminationGracePeriodSeconds", optional=True)
    _text(_field(spec, "os"), "name", optional=True)
    _text(_field(spec, "nodeSelector"), "kubernetes.io/os", optional=True)
    _text(spec, "restartPolicy", optional=True)
    return pod


def items(parent: Json, name: str) -> list[Json]:
    """The objects of a list that may be absent or null."""
    found: list[Json] = parent.get(name) or []
    return found


def field(parent: Json, name: str) -> Json:
    """An object that may be absent or null."""
    found: Json = parent.get(name) or {}
    return found


def _check_metadata(metadata: Json) -> None:
    for name in ("labels", "annotations"):
        for key, text in _field(metadata, name).items():
            if not isinstance(text, str):
                raise BadReview(f"metadata.{name}[{key[:100]!r}] is no text")
    for owner in _objects(metadata, "ownerReferences"):
        _text(owner, "kind", optional=True)


def _check_container(container: Json) -> None:
    _text(container, "name")
    _text(container, "restartPolicy", optional=True)
    for each in _objects(container, "volumeMounts"):
        _text(each, "name")
        _text(each, "mountPath")
    for each in _objects(container, "env"):
        _text(each, "name")
        _text(each, "value", optional=True)
    for each in _objects(container, "ports"):
        _text(each, "name", optional=True)
        _number(each, "containerPort")
    for each in _objects(_field(container, "resources"), "claims"):
        _text(each, "name")


def _object(value: object, name: str) -> Json:
    if not isinstance(value, dict):
        raise BadReview(f"{name} is no object")
    return value


def _field(parent: Json, name: str) -> Json:
    value = parent.get(name)
    return {} if value is None else _object(value, name)


def _objects(parent: Json, name: str) -> list[Json]:
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadReview(f"{name} is no list")
    return [_object(each, f"an element of {name}") for each in value]


def _text(parent: Json, name: str, *, optional: bool = False) -> None:
    value = parent.get(name)
    if not (isinstance(value, str) or (optional and value is None)):
        raise BadReview(f"{name} is no text")


def _number(parent: Json, name: str, *, optional: bool = False) -> None:
    value = parent.get(name)
    if not (_is_number(value) or (optional and value is None)):
        raise BadReview(f"{name} is no whole number")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
