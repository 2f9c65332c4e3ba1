"""What a session does after each error, whatever call met it, and how long it waits for a server that is away."""

from __future__ import annotations

import grpc
import pytest
from slotcar_client import errors
from slotcar_client.options import SessionOptions
from slotcar_client.recovery import Patience, Step, next_step

from tests.unit.client.plans import Clock

FAIL, WAIT, RANK = SessionOptions(), SessionOptions(away="wait"), SessionOptions(join="s1", rank=1)
STEPS = {
    errors.LayoutStale: Step.REMAP,
    errors.MappingNotFound: Step.REMAP,
    errors.SessionNotFound: Step.REOPEN,
}
AWAY = (errors.Unavailable, errors.ShuttingDown, errors.DeviceLost)
EVERY = [
    *errors.BY_REASON.values(),
    errors.SlotcarError,
    errors.AuditFailed,
    errors.SessionClosed,
    errors.MappingReplaced,
    errors.TransportError,
    errors.Unavailable,
    errors.ClientClosed,
    errors.DeadlineExceeded,
    errors.CallCancelled,
]


@pytest.mark.parametrize("kind", EVERY)
def test_each_error_has_one_step_and_most_are_the_callers(kind: type[errors.SlotcarError]) -> None:
    step = STEPS.get(kind, Step.RAISE)
    assert next_step(kind("x"), FAIL) is step
    assert next_step(kind("x"), WAIT) is (Step.WAIT if kind in AWAY else step)
    assert next_step(kind("x"), RANK) is (Step.RAISE if step is Step.REOPEN else step)


def test_an_unknown_reason_is_the_callers_unless_the_server_is_away() -> None:
    assert next_step(errors.SlotcarError("x", reason="LAYOUT_STALE_V2"), WAIT) is Step.RAISE
    lost = errors.SlotcarError("x", reason="NOT_YET_KNOWN", code=grpc.StatusCode.UNAVAILABLE)
    assert (next_step(lost, FAIL), next_step(lost, WAIT)) == (Step.RAISE, Step.WAIT)


def wait_for(patience: Patience, clock: Clock, error: errors.SlotcarError, slept: list[float]) -> None:
    while True:
        slept.append(patience.delay(error))
        clock.now += slept[-1]


def test_patience_is_a_time_in_all_with_growing_pauses() -> None:
    clock, slept = Clock(), list[float]()
    patience, gone = Patience(5.0, clock), errors.ShuttingDown("going down")
    with pytest.raises(errors.Unavailable, match=r"away for 5\.0 s: going down") as caught:
        wait_for(patience, clock, gone, slept)
    assert slept[:6] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0])
    assert sum(slept) == pytest.approx(5.0)
    assert caught.value.metadata == {"waited_seconds": "5.0"}
    assert caught.value.__cause__ is gone
    assert patience.cause == "SHUTTING_DOWN"


def test_without_patience_nothing_is_waited_for() -> None:
    with pytest.raises(errors.Unavailable, match=r"away for 0\.0 s"):
        Patience(0.0, Clock()).delay(errors.Unavailable("gone"))
