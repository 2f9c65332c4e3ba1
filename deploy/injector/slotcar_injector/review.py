"""AdmissionReview v1 in, AdmissionReview v1 out: bytes to bytes, and what it came to.

The same review always gets the same answer, so that a dry run and an API server's second call need no care.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from slotcar_injector import pod as pods
from slotcar_injector import shape
from slotcar_injector.annotations import request_of
from slotcar_injector.denial import BadReview, Denied, Reason, Result
from slotcar_injector.patch import difference
from slotcar_injector.places import LABEL
from slotcar_injector.placing import place
from slotcar_injector.settings import Settings
from slotcar_injector.shape import Json, field
from slotcar_injector.sidecar import pieces
from slotcar_injector.status import status_of

API_VERSION = "admission.k8s.io/v1"
_RESULTS = {Reason.NEW: Result.INJECTED, Reason.HEALED: Result.INJECTED, Reason.REPLACED: Result.INJECTED}
# An API server cuts longer ones, and all together.
_MOST_WARNING = 250
_SHOWN = ("uid", "namespace", "name", "dryRun")


@dataclass(frozen=True, slots=True)
class Reviewed:
    """The answer, what it came to, and what a log line says of it."""

    answer: bytes
    result: Result
    reason: Reason
    facts: Json


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pod gets: operations of a patch, warnings, or a refusal's text."""

    result: Result
    reason: Reason
    operations: tuple[Json, ...] = ()
    warnings: tuple[str, ...] = ()
    message: str = ""


def review(body: bytes, settings: Settings) -> Reviewed:
    """Raises BadReview for what is no AdmissionReview v1 with a request, or whose pod has not a pod's shape."""
    request = _request(body)
    outcome = admit(request, settings)
    response: Json = {"uid": request["uid"], "allowed": outcome.result is not Result.DENIED}
    if outcome.message:
        response["status"] = {"code": 422, "reason": "Invalid", "message": outcome.message}
    if outcome.operations:
        patch = json.dumps(outcome.operations, separators=(",", ":")).encode("ascii")
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode("ascii")}
    if outcome.warnings:
        response["warnings"] = [warning[:_MOST_WARNING] for warning in outcome.warnings]
    answer = {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
    facts = {name: request[name] for name in _SHOWN if name in request} | _facts(request, outcome)
    return Reviewed(json.dumps(answer).encode("ascii"), outcome.result, outcome.reason, facts)


def admit(request: Json, settings: Settings) -> Outcome:
    """What this request of an AdmissionReview gets. Raises BadReview."""
    skipped = _why_not(request)
    if skipped:
        return Outcome(Result.SKIPPED, skipped)
    pod = shape.check_pod(request.get("object"))
    metadata = field(pod, "metadata")
    if field(metadata, "labels").get(LABEL) != "true":
        return _unlabelled(metadata)
    if field(metadata, "annotations").get(LABEL) == "false":
        return Outcome(Result.SKIPPED, Reason.OPTED_OUT)
    if request.get("namespace") in settings.namespaces_left_out:
        return Outcome(Result.SKIPPED, Reason.NAMESPACE_LEFT_OUT)
    if "kubernetes.io/config.mirror" in field(metadata, "annotations"):
        return Outcome(Result.SKIPPED, Reason.STATIC_POD)
    try:
        injected, reason, warnings = inject(pod, settings)
    except Denied as denied:
        return Outcome(Result.DENIED, denied.reason, message=f"slotcar: {denied}")
    result = _RESULTS.get(reason, Result.UNCHANGED)
    return Outcome(result, reason, tuple(difference(pod, injected)), tuple(f"slotcar: {each}" for each in warnings))


def inject(pod: Json, settings: Settings) -> tuple[Json, Reason, list[str]]:
    """The pod with slotcar in it, how it came there, and what its author should know. Raises Denied."""
    request = request_of(field(field(pod, "metadata"), "annotations"), settings.defaults)
    target = pods.target_of(pod, request, settings.kube_version)
    if status_of(pod):
        pods.check_ports(pod, request)
        pods.check_engine(pod, target)
    else:
        pods.check_names(pod, request, target)
    injected, reason = place(pod, pieces(request, target, settings), settings.version)
    return injected, reason, pods.warnings_of(pod, request, target)


def read_json(body: bytes) -> Any:
    """JSON as the RFC has it, and each key once. Raises BadReview."""
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadReview(f"the body is no JSON: {str(error)[:200]}") from None


def _request(body: bytes) -> Json:
    found = read_json(body)
    if not isinstance(found, dict) or (found.get("apiVersion"), found.get("kind")) != (API_VERSION, "AdmissionReview"):
        raise BadReview(f"the body is no AdmissionReview of {API_VERSION}")
    request = found.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str) or not request["uid"]:
        raise BadReview("request.uid is missing")
    for name in ("namespace", "name", "operation", "subResource"):
        if not isinstance(request.get(name), str | None):
            raise BadReview(f"request.{name} is no text")
    return request


def _why_not(request: Json) -> Reason | None:
    """Why this request is none of ours, from what surrounds its object."""
    resource = request.get("resource")
    pod = {"group": "", "version": "v1", "resource": "pods"}
    if not isinstance(resource, dict) or {**pod, **resource} != pod or request.get("subResource"):
        return Reason.NOT_A_POD
    return Reason.NOT_A_CREATION if request.get("operation") != "CREATE" else None


def _unlabelled(metadata: Json) -> Outcome:
    text = field(metadata, "labels").get(LABEL)
    warnings: tuple[str, ...] = ()
    if text not in (None, "false"):
        warnings = (f"slotcar: label {LABEL} is {text[:60]!r}, wanted true or false: nothing is injected",)
    return Outcome(Result.SKIPPED, Reason.NOT_LABELLED, warnings=warnings)


def _facts(request: Json, outcome: Outcome) -> Json:
    """For the log: pods of controllers have no name yet, only the beginning of one."""
    facts: Json = {"result": outcome.result, "reason": outcome.reason}
    pod = request.get("object")
    if isinstance(pod, dict) and isinstance(pod.get("metadata"), dict):
        facts["generateName"] = pod["metadata"].get("generateName")
    if outcome.message:
        facts["message"] = outcome.message
    return facts


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
