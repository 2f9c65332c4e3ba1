"""How a failure of slotcar travels through vLLM as text, and which HTTP status its client gets.

Between vLLM's processes an exception arrives as its text alone. The text of a SlotcarError says its reason, so that the
front end can still tell an adapter that is gone from a sidecar that is away.
"""

from __future__ import annotations

import re
from http import HTTPStatus

import grpc

from slotcar_client.errors import BY_REASON, SlotcarError, TransportError

# With what vLLM puts behind the text of a worker's exception.
_TEXT = re.compile(r"slotcar ([A-Z_]+): (.*?)(?:', please check the stack trace above.*)?$", re.DOTALL)
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    # What passes by itself; a client may send the request again.
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.ABORTED: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}

_TRANSPORT: dict[str, type[SlotcarError]] = {kind.default_reason: kind for kind in TransportError.__subclasses__()}


def as_text(error: SlotcarError) -> str:
    """`slotcar REASON: message`, from which `from_text` makes the error again."""
    return f"slotcar {error.reason}: {error.message}"


def reason_text(reason: str) -> str:
    """The same for a `REASON: message` of the workers."""
    return f"slotcar {reason}"


def from_text(text: str) -> SlotcarError | None:
    """The error whose text is somewhere in `text`, None if none is."""
    found = _TEXT.search(text)
    if found is None:
        return None
    reason, message = found.groups()
    kind = BY_REASON.get(reason) or _TRANSPORT.get(reason, SlotcarError)
    return kind(message, reason=reason)


def slotcar_error(error: Exception) -> SlotcarError | None:
    """The failure of slotcar that this one is, or tells of from another process; None if it is vLLM's own."""
    return error if isinstance(error, SlotcarError) else from_text(str(error))


def http_status(error: SlotcarError) -> HTTPStatus:
    """The status of a request that failed with it; 500 for what is nobody's doing."""
    return _STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
