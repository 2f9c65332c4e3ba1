"""A short soak: clients are killed, stopped and told to end, the server is killed, and no row is wrong."""

from __future__ import annotations

import os

import pytest

from tests.soak.director import Director
from tests.soak.plan import Plan

PLAN = Plan(
    seed=int(os.environ.get("SOAK_SEED", "2")),
    seconds=12.0,
    calm_seconds=2.0,
    warm_up_seconds=1.0,
    clients=2,
    server_death_gap=(4.0, 5.0),
    server_pause_gap=(1.0, 2.0),
    client_fault_gap=(0.8, 1.2),
    least_client_faults=6,
)


def test_a_short_soak_finds_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`make soak` is the long one. To see it fail: drop both calls of check_current in Forwards._forward."""
    folder = tmp_path_factory.mktemp("soak")
    outcome = Director(PLAN, folder).run()
    assert outcome.problems() == [], f"python -m tests.soak --replay {folder}; SOAK_SEED={PLAN.seed} chooses the same"
    assert outcome.tally.rows > 1000
    assert outcome.server_kills > 0
    assert outcome.client_deaths >= 3
    assert outcome.done["client SIGSTOP"] > 0
