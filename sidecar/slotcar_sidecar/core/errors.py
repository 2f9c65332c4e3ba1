"""Every way in which slotcar refuses a call: one exception type per row of the error table.

SlotcarError
├── AdapterNotFound · AdapterNotResident · AdapterConflict · DigestMismatch
├── AdapterInvalid · AdapterUnsupported · ModelMismatch · ModelUnknown
├── SourceDenied · SourceUnavailable
├── SlotsExhausted · CapacityExceeded
├── LayoutStale · SessionNotFound · MappingNotFound
├── ShapeMismatch · SiteUnknown · RequestInvalid
├── Unauthenticated · NotAllowed
└── ShuttingDown · DeviceLost · InternalError
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar

_MAX_BYTES = 500
_MAX_LIST_BYTES = 2000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Reason(StrEnum):
    """The rows of the error table, named as on the wire."""

    ADAPTER_NOT_FOUND = "ADAPTER_NOT_FOUND"
    ADAPTER_NOT_RESIDENT = "ADAPTER_NOT_RESIDENT"
    ADAPTER_CONFLICT = "ADAPTER_CONFLICT"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    ADAPTER_INVALID = "ADAPTER_INVALID"
    ADAPTER_UNSUPPORTED = "ADAPTER_UNSUPPORTED"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    MODEL_UNKNOWN = "MODEL_UNKNOWN"
    SOURCE_DENIED = "SOURCE_DENIED"
    SOURCE_UNAVAILABLE = "SOURCE_UNAVAILABLE"
    SLOTS_EXHAUSTED = "SLOTS_EXHAUSTED"
    CAPACITY_EXCEEDED = "CAPACITY_EXCEEDED"
    LAYOUT_STALE = "LAYOUT_STALE"
    SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
    MAPPING_NOT_FOUND = "MAPPING_NOT_FOUND"
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    SITE_UNKNOWN = "SITE_UNKNOWN"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    REQUEST_INVALID = "REQUEST_INVALID"
    INTERNAL = "INTERNAL"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    DEVICE_LOST = "DEVICE_LOST"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    NOT_ALLOWED = "NOT_ALLOWED"


class SlotcarError(Exception):
    """A refusal with its reason and its facts; facts become the error details on the wire.

    `field` names the request field at fault, if one is; `retry_after_seconds` is set only where waiting helps. A fact
    that is a tuple is a list of whole names.
    """

    reason: ClassVar[Reason]
    field: str | None = None
    retry_after_seconds: float | None = None

    def __init__(self, message: str, **facts: object) -> None:
        self.message = _tame(message)
        super().__init__(self.message)
        self.facts = {key: _said(value) for key, value in facts.items() if value is not None}

    def at(self, field: str) -> SlotcarError:
        """The same refusal, as one of a field of the request."""
        error = copy.copy(self)
        error.field = field
        return error


def _tame(text: str) -> str:
    """The text without control characters, cut to 500 bytes: parts of it may come from a hostile request or file.

    A status travels in HTTP/2 headers, which may have 8 KiB; and a line break could forge a line of a log.
    """
    tame = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text[: _MAX_BYTES + 1])
    encoded = tame.encode(errors="replace")
    return f"{encoded[:_MAX_BYTES].decode(errors='ignore')}…" if len(encoded) > _MAX_BYTES else encoded.decode()


def _said(fact: object) -> str:
    return listed(fact, _MAX_LIST_BYTES) if isinstance(fact, tuple) else _tame(str(fact))


def listed(items: Sequence[object], max_bytes: int) -> str:
    """The items with commas between them; what does not fit is counted, and no item is cut."""
    said: list[str] = []
    size = 0
    for item in items:
        text = _tame(str(item))
        size += len(text.encode()) + 2
        if size > max_bytes:
            return f"{', '.join(said)} and {len(items) - len(said)} more"
        said.append(text)
    return ", ".join(said)


class AdapterNotFound(SlotcarError):
    reason = Reason.ADAPTER_NOT_FOUND

    def __init__(self, *refs: object, **facts: object) -> None:
        names = listed(refs, _MAX_BYTES // 2)
        super().__init__(f"there is no adapter {names}: load it from a source", adapters=refs, **facts)


class AdapterNotResident(SlotcarError):
    reason = Reason.ADAPTER_NOT_RESIDENT

    def __init__(self, *refs: object, **facts: object) -> None:
        names = listed(refs, _MAX_BYTES // 2)
        super().__init__(f"adapter {names} is in no slot: load it again, then set the mapping", adapters=refs, **facts)


class AdapterConflict(SlotcarError):
    reason = Reason.ADAPTER_CONFLICT

    def __init__(self, name: object, *, found: object, wanted: object) -> None:
        super().__init__(
            f"adapter {name} has other bytes: use another name, or replace it", adapter=name, found=found, wanted=wanted
        )


class DigestMismatch(SlotcarError):
    reason = Reason.DIGEST_MISMATCH

    def __init__(self, source: object, *, found: object, wanted: object) -> None:
        super().__init__(
            f"the bytes at {source} have digest {found}, not {wanted}", source=source, found=found, wanted=wanted
        )


class AdapterInvalid(SlotcarError):
    """Facts by name: file, field, tensor, found, wanted."""

    reason = Reason.ADAPTER_INVALID


class AdapterUnsupported(SlotcarError):
    """Facts by name: file, field, tensor, found, wanted."""

    reason = Reason.ADAPTER_UNSUPPORTED


class ModelMismatch(SlotcarError):
    reason = Reason.MODEL_MISMATCH


class ModelUnknown(SlotcarError):
    reason = Reason.MODEL_UNKNOWN

    def __init__(self) -> None:
        super().__init__(
            "the server does not know its model yet: start it with --base-model or --model-spec, "
            "or open a session with a model_spec, then load again"
        )


class SourceDenied(SlotcarError):
    reason = Reason.SOURCE_DENIED


class SourceUnavailable(SlotcarError):
    reason = Reason.SOURCE_UNAVAILABLE


class SlotsExhausted(SlotcarError):
    reason = Reason.SLOTS_EXHAUSTED

    def __init__(self, message: str, *, retry_after_seconds: float | None = None, **facts: object) -> None:
        super().__init__(message, **facts)
        self.retry_after_seconds = retry_after_seconds


class CapacityExceeded(SlotcarError):
    reason = Reason.CAPACITY_EXCEEDED


class LayoutStale(SlotcarError):
    reason = Reason.LAYOUT_STALE

    def __init__(self, message: str, *, entries: tuple[str, ...], **facts: object) -> None:
        super().__init__(message, entries=entries, **facts)


class SessionNotFound(SlotcarError):
    reason = Reason.SESSION_NOT_FOUND

    def __init__(self) -> None:
        super().__init__("no such session in this epoch: open one")


class MappingNotFound(SlotcarError):
    reason = Reason.MAPPING_NOT_FOUND

    def __init__(self, mapping_id: int) -> None:
        super().__init__(f"the session has no mapping {mapping_id}: set it", mapping_id=mapping_id)


class ShapeMismatch(SlotcarError):
    reason = Reason.SHAPE_MISMATCH

    def __init__(self, field: str, *, found: object, wanted: object, **facts: object) -> None:
        super().__init__(f"{field} is {found}, wanted {wanted}", field=field, found=found, wanted=wanted, **facts)
        self.field = field


class SiteUnknown(SlotcarError):
    reason = Reason.SITE_UNKNOWN

    def __init__(self, field: str, site: str) -> None:
        super().__init__(f"the model has no site {site!r}", field=field, site=site)
        self.field = field


class RequestInvalid(SlotcarError):
    reason = Reason.REQUEST_INVALID

    def __init__(self, field: str, *, found: object, wanted: object) -> None:
        super().__init__(f"{field} is {found!r}, wanted {wanted}", field=field, found=found, wanted=wanted)
        self.field = field

    def at(self, field: str) -> RequestInvalid:
        """The same refusal for the field of the request in which it came."""
        return RequestInvalid(field, found=self.facts["found"], wanted=self.facts["wanted"])


class ShuttingDown(SlotcarError):
    reason = Reason.SHUTTING_DOWN

    def __init__(self) -> None:
        super().__init__("the server is shutting down: retry elsewhere, or when a new epoch is up")


class DeviceLost(SlotcarError):
    reason = Reason.DEVICE_LOST

    def __init__(self, why: str) -> None:
        super().__init__(
            "the server's device computes no more: retry elsewhere, or when a new epoch is up", device_error=why
        )


class Unauthenticated(SlotcarError):
    reason = Reason.UNAUTHENTICATED

    def __init__(self, found: str) -> None:
        super().__init__(
            f"the policy knows nobody with {found}: nothing changes", found=found, wanted="credentials of a client"
        )


class NotAllowed(SlotcarError):
    reason = Reason.NOT_ALLOWED

    def __init__(self, client: str, what: str, **denied: object) -> None:
        """`denied`: the verb, adapter, plane or session that the client may not use."""
        super().__init__(f"the policy does not let {client} {what}: nothing changes", client=client, **denied)


class VersionMismatch(SlotcarError):
    reason = Reason.VERSION_MISMATCH
    field = "client_version"

    def __init__(self, *, found: str, wanted: str) -> None:
        super().__init__(f"the client is of version {found}, the server of {wanted}", found=found, wanted=wanted)


class InternalError(SlotcarError):
    reason = Reason.INTERNAL

    def __init__(self) -> None:
        super().__init__("a fault of slotcar itself: see the server's log")
