"""The error table is closed and total: server, API and client have the same rows, and each becomes a whole status."""

from __future__ import annotations

from collections import Counter

import grpc
import pytest
import slotcar_client
from google.rpc import error_details_pb2
from slotcar.v1 import error_pb2
from slotcar_client import errors as client_errors
from slotcar_sidecar.core import errors
from slotcar_sidecar.core.errors import Reason, SlotcarError
from slotcar_sidecar.rpc import status

from tests.conformance.refusals import CODES, DOMAIN

EXAMPLES: list[SlotcarError] = [
    errors.AdapterNotFound("sql", "chat"),
    errors.AdapterNotResident("sql"),
    errors.AdapterConflict("sql", found="a", wanted="b"),
    errors.DigestMismatch("/adapters/sql", found="a", wanted="b"),
    errors.AdapterInvalid("wrong", file="f", tensor="t", field="r", found="1", wanted="2"),
    errors.AdapterUnsupported("not served", file="f", field="use_dora", found="true", wanted="false"),
    errors.ModelMismatch("another model", difference="dtype"),
    errors.ModelUnknown(),
    errors.SourceDenied("outside", found="/etc", wanted="a path beneath /adapters"),
    errors.SourceUnavailable("gone", found="nothing", wanted="a folder"),
    errors.SlotsExhausted("all pinned", retry_after_seconds=1.5, slots=2, pinned=2),
    errors.CapacityExceeded("too large", found=2, wanted=1),
    errors.LayoutStale("changed", entries="sql@sha256:…", found=3, wanted=2),
    errors.SessionNotFound(),
    errors.MappingNotFound(7),
    errors.ShapeMismatch("items[0].x", found=[1, 2], wanted=[1, 3], site="q"),
    errors.SiteUnknown("items[0].site", "q"),
    errors.RequestInvalid("ref", found="", wanted="a name"),
    errors.ShuttingDown(),
    errors.InternalError(),
]


def test_every_row_is_everywhere() -> None:
    rows = {reason.value for reason in Reason}
    wire = {name.removeprefix("ERROR_REASON_") for name, number in error_pb2.ErrorReason.items() if number}
    assert wire == rows
    assert {reason.value: code for reason, code in status.CODES.items()} == CODES
    assert CODES.keys() == rows
    assert slotcar_client.errors.BY_REASON.keys() == rows
    for reason, kind in client_errors.BY_REASON.items():
        assert (kind.default_reason, kind.default_code) == (reason, CODES[reason])


def test_every_row_has_one_exception_and_one_example() -> None:
    rows = Counter(kind.reason for kind in SlotcarError.__subclasses__())
    assert rows == Counter(Reason)
    assert Counter(type(error) for error in EXAMPLES) == Counter(SlotcarError.__subclasses__())


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.reason.value)
def test_an_error_becomes_one_whole_status(error: SlotcarError) -> None:
    made = status.to_status(error)
    assert made.code == CODES[error.reason.value].value[0]
    assert made.message == error.message
    kinds = Counter(packed.type_url.rpartition(".")[2] for packed in made.details)
    assert kinds.pop("ErrorInfo") == 1
    info = error_details_pb2.ErrorInfo()
    assert made.details[0].Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == (DOMAIN, error.reason.value, error.facts)
    assert kinds.pop("BadRequest", 0) == (error.field is not None)
    needs_facts = CODES[error.reason.value] is grpc.StatusCode.FAILED_PRECONDITION
    assert kinds.pop("PreconditionFailure", 0) == needs_facts
    assert kinds.pop("RetryInfo", 0) == (error.retry_after_seconds is not None)
    assert not kinds


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.reason.value)
def test_an_error_as_a_value_is_the_same_row_at_the_client(error: SlotcarError) -> None:
    value = status.to_message(error)
    assert value.code == CODES[error.reason.value].value[0]
    met = client_errors.from_message(value)
    assert type(met) is client_errors.BY_REASON[error.reason.value]
    assert (met.reason, met.code, met.message) == (error.reason.value, CODES[error.reason.value], error.message)
    assert met.metadata == error.facts
