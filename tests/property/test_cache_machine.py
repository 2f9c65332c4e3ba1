"""Runs the state machine of the cache: 500 histories among the fast tests, 5,000 in `make test-full`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fakes.parts import digest_of
from tests.property.machine import NAMES, VERSIONS, CacheMachine


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
    run(500)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_5000_histories() -> None:
    run(5000)


def test_digests_of_the_fakes_differ() -> None:
    """The oracle could not see a swap otherwise."""
    contents = [name + version for name in NAMES for version in VERSIONS]
    assert len({digest_of(content) for content in contents}) == len(contents)
