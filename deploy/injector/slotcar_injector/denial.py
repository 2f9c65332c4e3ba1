"""What an admission can come to, and why: two closed tables, which metrics, logs and tests share."""

from __future__ import annotations

from enum import StrEnum


class Result(StrEnum):
    """What an admission came to."""

    INJECTED = "injected"
    UNCHANGED = "unchanged"
    SKIPPED = "skipped"
    DENIED = "denied"
    FAILED = "failed"


class Reason(StrEnum):
    """Why it came to this; each belongs to one Result."""

    NEW = "new"
    HEALED = "healed"
    REPLACED = "replaced"

    COMPLETE = "complete"

    NOT_A_POD = "not_a_pod"
    NOT_A_CREATION = "not_a_creation"
    NOT_LABELLED = "not_labelled"
    OPTED_OUT = "opted_out"
    NAMESPACE_LEFT_OUT = "namespace_left_out"
    STATIC_POD = "static_pod"

    ANNOTATION_UNKNOWN = "annotation_unknown"
    ANNOTATION_INVALID = "annotation_invalid"
    ANNOTATION_MISSING = "annotation_missing"
    CONTAINER_AMBIGUOUS = "container_ambiguous"
    CONTAINER_NOT_FOUND = "container_not_found"
    CLAIM_NOT_FOUND = "claim_not_found"
    VOLUME_NOT_FOUND = "volume_not_found"
    NAME_TAKEN = "name_taken"
    PORT_TAKEN = "port_taken"
    MEMORY_TOO_SMALL = "memory_too_small"
    MODE_UNFIT = "mode_unfit"
    VERSION_TOO_OLD = "version_too_old"
    WINDOWS = "windows"

    BODY_INVALID = "body_invalid"
    BODY_TOO_LARGE = "body_too_large"
    DEADLINE = "deadline"
    INTERNAL = "internal"


# Those of Result.FAILED.
FAILURES = (Reason.BODY_INVALID, Reason.BODY_TOO_LARGE, Reason.DEADLINE, Reason.INTERNAL)


class Denied(Exception):
    """The pod may not be created as it is; the message says what is wrong, what was found and what is wanted."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BadReview(Exception):
    """What came is no AdmissionReview of a pod that this server understands."""
