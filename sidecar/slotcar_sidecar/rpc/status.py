"""The one place where a domain error becomes a gRPC status: code, ErrorInfo and the details that belong to it."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from slotcar.v1 import error_pb2

from slotcar_sidecar.core.errors import Reason, SlotcarError
from slotcar_sidecar.rpc.convert import from_seconds

DOMAIN = "slotcar"
DETAILS_KEY = "grpc-status-details-bin"

CODES: dict[Reason, grpc.StatusCode] = {
    Reason.ADAPTER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.ADAPTER_NOT_RESIDENT: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ADAPTER_CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    Reason.DIGEST_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ADAPTER_INVALID: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ADAPTER_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MODEL_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MODEL_UNKNOWN: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SOURCE_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.SOURCE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.SLOTS_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.CAPACITY_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.LAYOUT_STALE: grpc.StatusCode.ABORTED,
    Reason.SESSION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.MAPPING_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.SHAPE_MISMATCH: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.SITE_UNKNOWN: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    Reason.REQUEST_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
    Reason.VERSION_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.DEVICE_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
}


def number_of(code: grpc.StatusCode) -> int:
    """The google.rpc.Code of a gRPC status code."""
    return int(code.value[0])


def to_status(error: SlotcarError) -> status_pb2.Status:
    """The google.rpc.Status: always one ErrorInfo, and BadRequest, PreconditionFailure and RetryInfo as they apply."""
    code = CODES[error.reason]
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=error.facts)
    ]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        facts = error.facts
        subject = facts.get("tensor") or facts.get("file") or facts.get("adapters") or error.field or ""
        fact = error_details_pb2.PreconditionFailure.Violation(
            type=error.reason.value, subject=subject, description=error.message
        )
        details.append(error_details_pb2.PreconditionFailure(violations=[fact]))
    if error.retry_after_seconds is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=_retry_delay(error)))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=number_of(code), message=error.message, details=packed)


def _retry_delay(error: SlotcarError) -> duration_pb2.Duration | None:
    return None if error.retry_after_seconds is None else from_seconds(error.retry_after_seconds)


def to_message(error: SlotcarError) -> error_pb2.Error:
    """The error as a value, for a stream that goes on after it."""
    return error_pb2.Error(
        code=number_of(CODES[error.reason]),
        reason=error_pb2.ErrorReason.Value(f"ERROR_REASON_{error.reason.value}"),
        message=error.message,
        metadata=error.facts,
        retry_after=_retry_delay(error),
    )
