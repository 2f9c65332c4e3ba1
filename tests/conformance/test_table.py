"""The error table is closed and total: server, API and client have the same rows, and each becomes a whole status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import grpc
import pytest
import slotcar_client
from google.rpc import error_details_pb2
from slotcar.v1 import error_pb2
from slotcar_client import errors as client_errors
from slotcar_sidecar.core import errors
from slotcar_sidecar.core.errors import Reason, SlotcarError
from slotcar_sidecar.rpc import status

from tests.conformance import (
    test_access,
    test_bad_adapters,
    test_bad_forwards,
    test_bad_requests,
    test_events,
    test_limits,
    test_mapping_loads,
    test_models,
    test_refused_states,
    test_sessions,
    test_shutdown,
)
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
    errors.LayoutStale("changed", entries=("sql@sha256:…",), found=3, wanted=2),
    errors.SessionNotFound(),
    errors.MappingNotFound(7),
    errors.ShapeMismatch("items[0].x", found=[1, 2], wanted=[1, 3], site="q"),
    errors.SiteUnknown("items[0].site", "q"),
    errors.RequestInvalid("ref", found="", wanted="a name"),
    errors.ShuttingDown(),
    errors.InternalError(),
    errors.VersionMismatch(found="9.0.0", wanted="0.1.0"),
    errors.DeviceLost("an illegal memory access"),
    errors.Unauthenticated("no credentials"),
    errors.NotAllowed("engine", "call EndSession", verb="EndSession"),
]


# One test per row that meets it over a socket, of several. Nobody can ask for a fault of the server, or of its GPU.
MET: dict[str, Callable[..., None]] = {
    "ADAPTER_NOT_FOUND": test_bad_requests.test_an_unknown_ref_is_not_found_by_every_call,
    "ADAPTER_NOT_RESIDENT": test_refused_states.test_an_adapter_that_lost_its_slot_is_not_resident,
    "ADAPTER_CONFLICT": test_refused_states.test_a_name_with_other_bytes_is_a_conflict,
    "DIGEST_MISMATCH": test_refused_states.test_other_bytes_than_were_asked_for_are_a_mismatch,
    "ADAPTER_INVALID": test_bad_adapters.test_a_broken_adapter_is_refused,
    "ADAPTER_UNSUPPORTED": test_bad_adapters.test_a_broken_adapter_is_refused,
    "MODEL_MISMATCH": test_models.test_another_model_is_refused_with_the_difference,
    "MODEL_UNKNOWN": test_models.test_a_server_without_a_model_waits_for_one,
    "SOURCE_DENIED": test_events.test_a_refused_load_is_told_with_its_reason,
    "SOURCE_UNAVAILABLE": test_mapping_loads.test_a_set_is_made_resident_whole_or_nothing_changes,
    "SLOTS_EXHAUSTED": test_refused_states.test_slots_that_are_all_pinned_are_exhausted_and_waiting_helps,
    "CAPACITY_EXCEEDED": test_limits.test_more_holds_than_allowed_are_refused,
    "LAYOUT_STALE": test_refused_states.test_a_forward_of_an_earlier_generation_is_stale,
    "SESSION_NOT_FOUND": test_refused_states.test_a_closed_session_is_not_found,
    "MAPPING_NOT_FOUND": test_refused_states.test_a_released_mapping_is_not_found,
    "SHAPE_MISMATCH": test_bad_forwards.test_a_forward_that_does_not_fit_is_refused,
    "SITE_UNKNOWN": test_bad_forwards.test_a_forward_that_does_not_fit_is_refused,
    "SHUTTING_DOWN": test_shutdown.test_a_server_that_shuts_down,
    "REQUEST_INVALID": test_bad_requests.test_a_malformed_ref_is_refused_by_every_call,
    "UNAUTHENTICATED": test_access.test_a_call_without_credentials_is_unauthenticated,
    "NOT_ALLOWED": test_access.test_a_client_may_what_its_entry_says_and_no_more,
    "VERSION_MISMATCH": test_sessions.test_versions_that_are_too_far_apart_are_refused,
}


def test_every_row_is_met_over_a_socket() -> None:
    assert MET.keys() == CODES.keys() - {"INTERNAL", "DEVICE_LOST"}


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
    delay = value.retry_after.ToNanoseconds() / 1e9 if value.HasField("retry_after") else None
    assert delay == error.retry_after_seconds
