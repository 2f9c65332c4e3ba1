"""The server process, as operators see and change it: its settings, the level of its log, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import duration_pb2
from slotcar.v1 import engine_service_pb2
from slotcar.v1 import operator_service_pb2 as pb

from tests.conformance.calls import refusal_of
from tests.conformance.refusals import refused
from tests.conformance.target import MODEL, PATIENCE_SECONDS, Target, seconds


def settings(target: Target) -> pb.GetSettingsResponse:
    return target.operators.GetSettings(pb.GetSettingsRequest(), timeout=PATIENCE_SECONDS)


def set_level(target: Target, level: pb.LogLevel.ValueType) -> pb.LogLevel.ValueType:
    request = pb.SetLogLevelRequest(level=level)
    return target.operators.SetLogLevel(request, timeout=PATIENCE_SECONDS).previous


def shut_down(target: Target, **request: duration_pb2.Duration) -> pb.ShutdownResponse:
    return target.operators.Shutdown(pb.ShutdownRequest(**request), timeout=PATIENCE_SECONDS)


@pytest.fixture
def own(start_target: Callable[..., Target]) -> Target:
    """A server of this test's own, which waits for its model."""
    return start_target()


def test_the_settings_are_those_of_the_flags(own: Target) -> None:
    """And the process is the one that was started; no variable of the environment is among them."""
    assert own.process is not None
    assert own.process.process is not None
    found = settings(own)
    assert (found.pid, found.working_directory) == (own.process.process.pid, str(Path.cwd()))
    assert list(found.addresses) == [own.address]
    assert found.metrics_url == own.metrics_url
    assert 0 <= time.time() - found.started.seconds < 10 * PATIENCE_SECONDS
    assert found.log_level == pb.LOG_LEVEL_INFO
    wanted = {"listen": own.address, "slots": "2", "max_rank": "16", "heartbeat_seconds": "0.2", "disk": ""}
    assert {name: found.settings[name] for name in wanted} == wanted
    assert (found.settings["planes"], found.settings["insecure"]) == ("stream ring direct", "false")
    assert "PATH" not in str(found)


def test_a_server_says_where_it_is_in_its_life(own: Target) -> None:
    """It waits for a model, has one, and ends. A lost GPU is for the tests with one."""
    assert settings(own).state == pb.SERVER_STATE_WAITING_FOR_MODEL
    own.learn(MODEL)
    assert settings(own).state == pb.SERVER_STATE_SERVING
    with own.session() as session:
        session.set_mapping(None)
        shut_down(own)
        assert settings(own).state == pb.SERVER_STATE_SHUTTING_DOWN


def test_the_level_of_the_log_is_changed(own: Target) -> None:
    assert own.process is not None
    assert set_level(own, pb.LOG_LEVEL_ERROR) == pb.LOG_LEVEL_INFO
    assert settings(own).log_level == pb.LOG_LEVEL_ERROR
    own.learn(MODEL)
    assert "session_opened" not in own.process.log
    assert set_level(own, pb.LOG_LEVEL_DEBUG) == pb.LOG_LEVEL_ERROR
    with own.session() as session:
        assert session.id
    assert set_level(own, pb.LOG_LEVEL_INFO) == pb.LOG_LEVEL_DEBUG
    assert own.process.stop() == 0
    assert own.process.log.count("session_opened") == 1


@pytest.mark.parametrize("level", [0, 5, -1, 2**31 - 1])
def test_what_is_no_level_is_refused(target: Target, level: int) -> None:
    before = settings(target).log_level
    refusal = refusal_of(target, pb.SetLogLevelRequest(level=level))  # type: ignore[arg-type]
    assert (refusal.reason, refusal.metadata["field"]) == ("REQUEST_INVALID", "level")
    assert settings(target).log_level == before


DEADLINES = {
    "before now": duration_pb2.Duration(seconds=-1),
    "a little before now": duration_pb2.Duration(nanos=-1),
    "later than a day": duration_pb2.Duration(seconds=24 * 3600, nanos=1),
    "for ever": duration_pb2.Duration(seconds=2**62),
    "no duration": duration_pb2.Duration(seconds=1, nanos=-1),
    "too many nanos": duration_pb2.Duration(seconds=1, nanos=10**9),
}


@pytest.mark.parametrize("deadline", DEADLINES)
def test_a_deadline_out_of_its_bounds_is_refused(target: Target, deadline: str) -> None:
    """And the server goes on."""
    with target.unchanged():
        refusal = refused(shut_down, target, deadline=DEADLINES[deadline])
    assert (refusal.reason, refusal.metadata["field"]) == ("REQUEST_INVALID", "deadline")
    assert settings(target).state == pb.SERVER_STATE_SERVING


def test_bytes_that_are_no_message_end_nothing(target: Target) -> None:
    call = target.channel.unary_unary("/slotcar.v1.OperatorService/Shutdown")
    with target.unchanged():
        refusal = refused(call, b"\xff\xff\xff", timeout=PATIENCE_SECONDS)
    assert refusal.reason == "REQUEST_INVALID"
    assert settings(target).state == pb.SERVER_STATE_SERVING


def test_the_end_may_be_asked_for_again(own: Target) -> None:
    """Each time it is answered, and of all deadlines the nearest counts; then the process ends with 0."""
    own.learn(MODEL)
    assert own.process is not None
    assert own.process.process is not None
    with own.session() as session:
        session.set_mapping(None)
        first = shut_down(own, deadline=seconds(3600))
        assert 3500 < first.time_left.seconds <= 3600
        assert first.layout.epoch == own.state().layout.version.epoch
        assert shut_down(own, deadline=seconds(7200)).time_left.seconds <= 3600
        assert shut_down(own).time_left.seconds <= 5  # what the server is set to
        opening = own.engine.OpenSession(engine_service_pb2.OpenSessionRequest(), timeout=PATIENCE_SECONDS)
        assert refused(next, opening).reason == "SHUTTING_DOWN"
        assert shut_down(own, deadline=seconds(0)).time_left.seconds == 0
    assert own.process.process.wait(PATIENCE_SECONDS) == 0
