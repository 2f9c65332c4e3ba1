"""Runs the state machine of the cache: 500 histories among the fast tests, 5,000 in `make test-full`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from slotcar_sidecar.core.events import EventKind

from tests.fakes.parts import digest_of
from tests.property.machine import CacheMachine
from tests.property.oracle import FORWARD_ERRORS
from tests.property.world import NAMES, VERSIONS

ELSEWHERE = {EventKind.STORAGE_FAULT, EventKind.DECLARED, EventKind.RECONCILED}
"""Of files and declarations, for which the machine has no rules."""

HARD_STATES = {
    "a call that waited is served or refused",
    "a fill waits for a reader",
    "a ring computes",
    "a server of a later life",
    "an upload is on disk alone",
    "a slot is held",
    "calls wait beside a reservation",
    "direct: OK",
    "slots are reserved",
    "two calls wait",
    "two slots are written",
    *(kind.value for kind in set(EventKind) - ELSEWHERE),
    *(f"Forward: {ending}" for ending in ("OK", "abandoned", *(reason.value for reason in FORWARD_ERRORS))),
    *(f"refused: {reason}" for reason in ("SLOTS_EXHAUSTED", "ADAPTER_CONFLICT")),
}


def run(examples: int) -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_500_histories() -> None:
    """And they reach the states that are hard to get right."""
    CacheMachine.reached.clear()
    run(500)
    print(CacheMachine.reached)
    assert {state for state in HARD_STATES if not CacheMachine.reached[state]} == set()


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_5000_histories() -> None:
    run(5000)


def test_digests_of_the_fakes_differ() -> None:
    """The oracle could not see a swap otherwise."""
    contents = [name + version for name in NAMES for version in VERSIONS]
    assert len({digest_of(content) for content in contents}) == len(contents)
