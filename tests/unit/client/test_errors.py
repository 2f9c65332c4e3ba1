"""The client's exceptions: every row of the error table, every gRPC status, and what a newer server may say."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from slotcar.v1 import error_pb2
from slotcar_client import errors
from slotcar_sidecar.core import errors as server_errors
from slotcar_sidecar.rpc import status as server_status

REASONS = [name.removeprefix("ERROR_REASON_") for name, number in error_pb2.ErrorReason.items() if number]


class FailedCall(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """What a stub raises."""

    def __init__(self, code: grpc.StatusCode, details: str, *trailers: tuple[str, bytes | str]) -> None:
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes | str], ...]:
        return self._trailers

    def initial_metadata(self) -> tuple[()]:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None:
        return None

    def cancel(self) -> None:
        return None

    def add_callback(self, callback: object) -> bool:
        return False


def server_error(reason: str) -> server_errors.SlotcarError:
    """An error of the server with that reason, however its constructor is."""
    kind = next(c for c in server_errors.SlotcarError.__subclasses__() if c.reason.value == reason)
    error = kind.__new__(kind)
    server_errors.SlotcarError.__init__(error, f"about {reason}", adapter="sql", found="a", wanted="b")
    return error


def failed(status: status_pb2.Status, code: grpc.StatusCode) -> FailedCall:
    return FailedCall(code, status.message, ("grpc-status-details-bin", status.SerializeToString()))


def test_every_row_has_a_class_of_its_own() -> None:
    assert set(errors.BY_REASON) == set(REASONS)
    assert len(set(errors.BY_REASON.values())) == len(REASONS)


@pytest.mark.parametrize("reason", REASONS)
def test_a_row_comes_over_a_call_and_over_a_stream_alike(reason: str) -> None:
    sent = server_error(reason)
    code = server_status.CODES[sent.reason]
    called = errors.from_rpc_error(failed(server_status.to_status(sent), code))
    streamed = errors.from_message(server_status.to_message(sent))
    for error in (called, streamed):
        assert type(error) is errors.BY_REASON[reason]
        assert type(error).default_code is code
        assert (error.reason, error.code, error.message) == (reason, code, f"about {reason}")
        assert error.metadata == {"adapter": "sql", "found": "a", "wanted": "b"}
        assert str(error) == f"about {reason}"


def test_retry_info_becomes_seconds() -> None:
    sent = server_errors.SlotsExhausted("all pinned", retry_after_seconds=1.5, slots=2)
    error = errors.from_rpc_error(failed(server_status.to_status(sent), grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert isinstance(error, errors.SlotsExhausted)
    assert error.retry_after_seconds == 1.5
    assert error.metadata == {"slots": "2"}


def test_a_stream_says_when_to_try_again_as_a_call_does() -> None:
    sent = error_pb2.Error(code=8, reason=error_pb2.ERROR_REASON_SLOTS_EXHAUSTED, message="all pinned")
    assert errors.from_message(sent).retry_after_seconds is None
    sent.retry_after.FromMilliseconds(1500)
    assert errors.from_message(sent).retry_after_seconds == 1.5


BY_STATUS = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.CallCancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CapacityExceeded,
}


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_without_details_has_a_class(code: grpc.StatusCode) -> None:
    error = errors.from_rpc_error(FailedCall(code, ""))
    assert type(error) is BY_STATUS.get(code, errors.TransportError)
    assert error.code is code
    assert error.message == code.name
    assert error.reason == ("CAPACITY_EXCEEDED" if code is grpc.StatusCode.RESOURCE_EXHAUSTED else code.name)


def test_a_reason_of_a_newer_server_is_kept() -> None:
    info = error_details_pb2.ErrorInfo(reason="NOT_YET_KNOWN", domain="slotcar", metadata={"device": "0"})
    packed = any_pb2.Any()
    packed.Pack(info)
    error = errors.from_rpc_error(
        failed(status_pb2.Status(code=14, message="gone", details=[packed]), grpc.StatusCode.UNAVAILABLE)
    )
    assert type(error) is errors.SlotcarError
    assert (error.reason, error.metadata) == ("NOT_YET_KNOWN", {"device": "0"})
    streamed = errors.from_message(error_pb2.Error(code=99, reason=77, message="new"))  # type: ignore[arg-type]
    assert type(streamed) is errors.SlotcarError
    assert (streamed.reason, streamed.code) == ("REASON_77", grpc.StatusCode.UNKNOWN)


def test_details_that_are_not_ours_are_not_a_row() -> None:
    foreign, retry = any_pb2.Any(), any_pb2.Any()
    foreign.Pack(error_details_pb2.ErrorInfo(reason="ADAPTER_NOT_FOUND", domain="googleapis.com"))
    retry.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1)))
    error = errors.from_rpc_error(
        failed(status_pb2.Status(code=5, message="?", details=[foreign, retry]), grpc.StatusCode.NOT_FOUND)
    )
    assert type(error) is errors.TransportError
    assert error.reason == "NOT_FOUND"


@pytest.mark.parametrize("trailer", [b"\xff\xff\xff", b"", b"\x08"])
def test_details_that_cannot_be_read_are_no_crash(trailer: bytes) -> None:
    call = FailedCall(grpc.StatusCode.UNAVAILABLE, "down", ("grpc-status-details-bin", trailer))
    assert type(errors.from_rpc_error(call)) is errors.Unavailable


def test_an_error_without_a_status_is_no_crash() -> None:
    assert type(errors.from_rpc_error(grpc.RpcError())) is errors.TransportError
    assert type(errors.from_rpc_error(FailedCall(None, None))) is errors.TransportError  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Received RST_STREAM with error code 2", errors.Unavailable),
        ("Exception deserializing response!", errors.TransportError),
    ],
)
def test_what_a_proxy_reset_is_a_server_that_is_away_and_no_other_fault_is(
    text: str, kind: type[errors.SlotcarError]
) -> None:
    assert type(errors.from_rpc_error(FailedCall(grpc.StatusCode.INTERNAL, text))) is kind
