"""What a session does after each error, whatever call met it."""

from __future__ import annotations

import pytest
from slotcar_client import errors
from slotcar_client.recovery import Step, next_step

STEPS = {
    errors.LayoutStale: Step.REMAP,
    errors.MappingNotFound: Step.REMAP,
    errors.SessionNotFound: Step.REOPEN,
}
EVERY = [
    *errors.BY_REASON.values(),
    errors.SlotcarError,
    errors.AuditFailed,
    errors.TransportError,
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.CallCancelled,
]


@pytest.mark.parametrize("kind", EVERY)
def test_each_error_has_one_step_and_all_but_three_are_the_callers(kind: type[errors.SlotcarError]) -> None:
    assert next_step(kind("x")) is STEPS.get(kind, Step.RAISE)


def test_an_unknown_reason_is_the_callers() -> None:
    assert next_step(errors.SlotcarError("x", reason="LAYOUT_STALE_V2")) is Step.RAISE
