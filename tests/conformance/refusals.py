"""Reads a refusal as any client would, and checks what every refusal must have.

Each is one row of the error table: its code, exactly one ErrorInfo of the domain "slotcar" with that row's reason,
BadRequest only for fields that the request has, PreconditionFailure only for facts about an adapter or the server, and
RetryInfo only where waiting helps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from slotcar.v1 import error_pb2

from tests.planes.errors import PlaneError

DOMAIN = "slotcar"
# What gRPC's clients, with their own settings, are sure to accept of all trailers together.
MAX_TRAILER_BYTES = 8192
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

CODES: Mapping[str, grpc.StatusCode] = {
    "ADAPTER_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "ADAPTER_NOT_RESIDENT": grpc.StatusCode.FAILED_PRECONDITION,
    "ADAPTER_CONFLICT": grpc.StatusCode.ALREADY_EXISTS,
    "DIGEST_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "ADAPTER_INVALID": grpc.StatusCode.FAILED_PRECONDITION,
    "ADAPTER_UNSUPPORTED": grpc.StatusCode.FAILED_PRECONDITION,
    "MODEL_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "MODEL_UNKNOWN": grpc.StatusCode.FAILED_PRECONDITION,
    "SOURCE_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "SOURCE_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "SLOTS_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "CAPACITY_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "LAYOUT_STALE": grpc.StatusCode.ABORTED,
    "SESSION_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "MAPPING_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "SHAPE_MISMATCH": grpc.StatusCode.INVALID_ARGUMENT,
    "SITE_UNKNOWN": grpc.StatusCode.INVALID_ARGUMENT,
    "SHUTTING_DOWN": grpc.StatusCode.UNAVAILABLE,
    "REQUEST_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "VERSION_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "DEVICE_LOST": grpc.StatusCode.UNAVAILABLE,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "NOT_ALLOWED": grpc.StatusCode.PERMISSION_DENIED,
}


class Refusal(NamedTuple):
    """A row of the error table with its facts; `fields` are BadRequest's, `subjects` are PreconditionFailure's."""

    reason: str
    message: str
    metadata: Mapping[str, str]
    fields: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    retry_seconds: float | None = None


def refused(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Refusal:
    """The refusal of a call, checked."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **keywords)
    return read(caught.value)


def read(error: grpc.RpcError) -> Refusal:
    """The refusal that a stub raised, checked."""
    if isinstance(error, PlaneError):
        return read_value(error.value)
    status = rpc_status.from_call(error)
    assert status is not None, f"no details: {error}"
    trailers = [*error.trailing_metadata(), ("grpc-message", error.details())]
    assert sum(len(key) + len(value) + 32 for key, value in trailers) <= MAX_TRAILER_BYTES
    details: dict[str, list[Any]] = {"ErrorInfo": [], "BadRequest": [], "PreconditionFailure": [], "RetryInfo": []}
    for packed in status.details:
        name = packed.type_url.rpartition(".")[2]
        details[name].append(getattr(error_details_pb2, name).FromString(packed.value))
    (info,) = details["ErrorInfo"]
    assert info.domain == DOMAIN
    fields = [violation.field for detail in details["BadRequest"] for violation in detail.field_violations]
    facts = [violation for detail in details["PreconditionFailure"] for violation in detail.violations]
    assert {violation.type for violation in facts} <= {info.reason}
    delays = [detail.retry_delay.ToNanoseconds() / 1e9 for detail in details["RetryInfo"]]
    assert not delays or (info.reason == "SLOTS_EXHAUSTED" and min(delays) > 0)
    assert len(delays) <= 1
    assert bool(facts) == (error.code() is grpc.StatusCode.FAILED_PRECONDITION)
    assert len(details["BadRequest"]) <= 1
    assert len(details["PreconditionFailure"]) <= 1
    subjects = tuple(violation.subject for violation in facts)
    refusal = Refusal(
        info.reason, status.message, dict(info.metadata), tuple(fields), subjects, delays[0] if delays else None
    )
    _check(refusal, error.code())
    return refusal


def read_value(error: error_pb2.Error) -> Refusal:
    """The refusal that a stream answered, checked."""
    reason = error_pb2.ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
    delay = error.retry_after.ToNanoseconds() / 1e9 if error.HasField("retry_after") else None
    assert delay is None or (reason == "SLOTS_EXHAUSTED" and delay > 0)
    facts = dict(error.metadata)
    fields = (facts["field"],) if "field" in facts else ()
    subject = facts.get("tensor") or facts.get("file") or facts.get("adapters") or facts.get("field", "")
    subjects = (subject,) if CODES[reason] is grpc.StatusCode.FAILED_PRECONDITION else ()
    refusal = Refusal(reason, error.message, facts, fields, subjects, delay)
    code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
    _check(refusal, code)
    return refusal


def has_field(message: Descriptor, path: str) -> bool:
    """Whether a path such as items[0].x.dtype leads to a field, or a oneof, of the message."""
    name, _, rest = path.partition(".")
    name, index = re.fullmatch(r"(\w+)(\[\d+\])?", name).groups()  # type: ignore[union-attr]
    if name in message.oneofs_by_name:
        return not rest
    field = message.fields_by_name.get(name)
    if field is None or (index is not None and not field.is_repeated):
        return False
    return not rest or (field.message_type is not None and has_field(field.message_type, rest))


def _check(refusal: Refusal, code: grpc.StatusCode) -> None:
    assert code is CODES[refusal.reason]
    assert refusal.reason != "INTERNAL", "a fault of the server itself"
    assert refusal.message
    for text in (refusal.message, *refusal.metadata.values()):
        assert CONTROL.search(text) is None, f"a control character in {text!r}"
