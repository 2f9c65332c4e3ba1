"""Every way in which a call can fail: one exception type per row of the error table, and gRPC's own failures.

SlotcarError                    also a row that only a newer server knows
├── AdapterNotFound · AdapterNotResident · AdapterConflict · DigestMismatch
├── AdapterInvalid · AdapterUnsupported · ModelMismatch · ModelUnknown
├── SourceDenied · SourceUnavailable
├── SlotsExhausted · CapacityExceeded
├── LayoutStale
├── SessionNotFound
│   └── SessionClosed           this side closed it
├── MappingNotFound
│   └── MappingReplaced         this side set no such mapping, or set another with its id
├── ShapeMismatch · SiteUnknown · RequestInvalid
├── VersionMismatch · ShuttingDown · DeviceLost
├── Unauthenticated · NotAllowed
├── InternalError
│   └── AuditFailed             an answer is not the answer to the question; its tensors were thrown away
└── TransportError              gRPC failed without a row of the table
    ├── Unavailable             no server answers
    │   └── ClientClosed        this side closed the client, or is a fork of the process that connected
    ├── DeadlineExceeded        no answer in time
    └── CallCancelled           this side gave up
"""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from slotcar.v1 import error_pb2

DOMAIN = "slotcar"
_DETAILS_KEY = "grpc-status-details-bin"
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_REASON_PREFIX = "ERROR_REASON_"


class SlotcarError(Exception):
    """A call that failed. `reason` is the row of the error table, `metadata` holds its facts by name.

    `code` is the gRPC status; `retry_after_seconds` is set only where waiting helps.
    """

    default_reason: ClassVar[str] = "UNKNOWN"
    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        code: grpc.StatusCode | None = None,
        retry_after_seconds: float | None = None,
        **facts: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.code = code or self.default_code
        self.retry_after_seconds = retry_after_seconds
        self.metadata = {key: str(value) for key, value in facts.items() if value is not None}


class AdapterNotFound(SlotcarError):
    default_reason = "ADAPTER_NOT_FOUND"
    default_code = grpc.StatusCode.NOT_FOUND


class AdapterNotResident(SlotcarError):
    default_reason = "ADAPTER_NOT_RESIDENT"
    default_code = grpc.StatusCode.FAILED_PRECONDITION


class AdapterConflict(SlotcarError):
    default_reason = "ADAPTER_CONFLICT"
    default_code = grpc.StatusCode.ALREADY_EXISTS


class DigestMismatch(SlotcarError):
    default_reason = "DIGEST_MISMATCH"
    default_code = grpc.StatusCode.FAILED_PRECONDITION


class AdapterInvalid(SlotcarError):
    default_reason = "ADAPTER_INVALID"
    default_code = grpc.StatusCode.FAILED_PRECONDITION


class AdapterUnsupported(SlotcarError):
    default_reason = "ADAPTER_UNSUPPORTED"
    default_code = grpc.StatusCode.FAILED_PRECONDITION


class ModelMismatch(SlotcarError):
    default_reason = "MODEL_MISMATCH"
    default_code = grpc.StatusCode.FAILED_PRECONDITION


class ModelUnknown(SlotcarError):
    default_reason = "MODEL_UNKNOWN"
    default_code = grpc.StatusCode.FAILED_PRECONDITION


class SourceDenied(SlotcarError):
    default_reason = "SOURCE_DENIED"
    default_code = grpc.StatusCode.PERMISSION_DENIED


class SourceUnavailable(SlotcarError):
    default_reason = "SOURCE_UNAVAILABLE"
    default_code = grpc.StatusCode.UNAVAILABLE


class SlotsExhausted(SlotcarError):
    default_reason = "SLOTS_EXHAUSTED"
    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class CapacityExceeded(SlotcarError):
    default_reason = "CAPACITY_EXCEEDED"
    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class LayoutStale(SlotcarError):
    default_reason = "LAYOUT_STALE"
    default_code = grpc.StatusCode.ABORTED


class SessionNotFound(SlotcarError):
    default_reason = "SESSION_NOT_FOUND"
    default_code = grpc.StatusCode.NOT_FOUND


class SessionClosed(SessionNotFound):
    """The session was closed by this side; only a new one goes on."""


class MappingNotFound(SlotcarError):
    default_reason = "MAPPING_NOT_FOUND"
    default_code = grpc.StatusCode.NOT_FOUND


class MappingReplaced(MappingNotFound):
    """This side set no such mapping, released it, or set another with its id."""


class ShapeMismatch(SlotcarError):
    default_reason = "SHAPE_MISMATCH"
    default_code = grpc.StatusCode.INVALID_ARGUMENT


class SiteUnknown(SlotcarError):
    default_reason = "SITE_UNKNOWN"
    default_code = grpc.StatusCode.INVALID_ARGUMENT


class RequestInvalid(SlotcarError):
    default_reason = "REQUEST_INVALID"
    default_code = grpc.StatusCode.INVALID_ARGUMENT


class VersionMismatch(SlotcarError):
    default_reason = "VERSION_MISMATCH"
    default_code = grpc.StatusCode.FAILED_PRECONDITION


class ShuttingDown(SlotcarError):
    default_reason = "SHUTTING_DOWN"
    default_code = grpc.StatusCode.UNAVAILABLE


class DeviceLost(SlotcarError):
    default_reason = "DEVICE_LOST"
    default_code = grpc.StatusCode.UNAVAILABLE


class Unauthenticated(SlotcarError):
    default_reason = "UNAUTHENTICATED"
    default_code = grpc.StatusCode.UNAUTHENTICATED


class NotAllowed(SlotcarError):
    default_reason = "NOT_ALLOWED"
    default_code = grpc.StatusCode.PERMISSION_DENIED


class InternalError(SlotcarError):
    default_reason = "INTERNAL"
    default_code = grpc.StatusCode.INTERNAL


class AuditFailed(InternalError):
    """An answer reports other digests, an other epoch or other shapes than the call was for."""


class TransportError(SlotcarError):
    """gRPC failed without a row of the table; `reason` is the name of the gRPC status."""


class Unavailable(TransportError):
    default_reason = "UNAVAILABLE"
    default_code = grpc.StatusCode.UNAVAILABLE


class ClientClosed(Unavailable):
    """This side closed the client, or is a fork of the process that connected; nothing was sent."""


class DeadlineExceeded(TransportError):
    default_reason = "DEADLINE_EXCEEDED"
    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class CallCancelled(TransportError):
    default_reason = "CANCELLED"
    default_code = grpc.StatusCode.CANCELLED


BY_REASON: dict[str, type[SlotcarError]] = {
    error.default_reason: error
    for error in (
        AdapterNotFound,
        AdapterNotResident,
        AdapterConflict,
        DigestMismatch,
        AdapterInvalid,
        AdapterUnsupported,
        ModelMismatch,
        ModelUnknown,
        SourceDenied,
        SourceUnavailable,
        SlotsExhausted,
        CapacityExceeded,
        LayoutStale,
        SessionNotFound,
        MappingNotFound,
        ShapeMismatch,
        SiteUnknown,
        RequestInvalid,
        VersionMismatch,
        ShuttingDown,
        DeviceLost,
        Unauthenticated,
        NotAllowed,
        InternalError,
    )
}

# What a status without our ErrorInfo means. A message over a size limit is gRPC's only RESOURCE_EXHAUSTED.
_BY_CODE: dict[grpc.StatusCode, type[SlotcarError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: CallCancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityExceeded,
}
_RESET = "Received RST_STREAM"


def from_rpc_error(error: grpc.RpcError) -> SlotcarError:
    """The exception for a failed RPC. Total: any error gives one, whatever it lacks."""
    if not isinstance(error, grpc.Call | aio.AioRpcError):
        return TransportError(str(error) or "the call failed without a status")
    code = error.code() or grpc.StatusCode.UNKNOWN
    message = error.details() or code.name
    info, retry_after_seconds = _details(error)
    if info is None:
        if code is grpc.StatusCode.INTERNAL and _RESET in message:
            # By a proxy that lost the server: to gRPC that is INTERNAL, which no server said.
            return Unavailable(message)
        kind = _BY_CODE.get(code, TransportError)
        reason = code.name if kind is TransportError else None
        return kind(message, reason=reason, code=code)
    return _make(info.reason, message, code, dict(info.metadata), retry_after_seconds)


def from_message(error: error_pb2.Error) -> SlotcarError:
    """The exception for an error that came as a value. Total, also for reasons and codes of a newer server."""
    code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
    try:
        reason = error_pb2.ErrorReason.Name(error.reason).removeprefix(_REASON_PREFIX)
    except ValueError:
        reason = f"REASON_{error.reason}"
    retry_after_seconds = _seconds(error.retry_after) if error.HasField("retry_after") else None
    return _make(reason, error.message or reason, code, dict(error.metadata), retry_after_seconds)


def _make(
    reason: str, message: str, code: grpc.StatusCode, metadata: dict[str, str], retry_after_seconds: float | None
) -> SlotcarError:
    error = BY_REASON.get(reason, SlotcarError)(
        message, reason=reason, code=code, retry_after_seconds=retry_after_seconds
    )
    error.metadata = metadata
    return error


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _details(call: grpc.Call | aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    """Our ErrorInfo and the RetryInfo's seconds of a call's status, None for what it lacks."""
    info, retry_after_seconds = None, None
    for packed in _status(call).details:
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            found = error_details_pb2.ErrorInfo.FromString(packed.value)
            info = found if found.domain == DOMAIN else info
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry_after_seconds = _seconds(error_details_pb2.RetryInfo.FromString(packed.value).retry_delay)
    return info, retry_after_seconds


def _status(call: grpc.Call | aio.AioRpcError) -> status_pb2.Status:
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()
