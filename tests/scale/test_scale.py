"""Many adapters on eight slots: no wrong row, as many hits as the policy allows, and no Forward waits for a load."""

from __future__ import annotations

from pathlib import Path

import pytest
from slotcar_sidecar.core.policy import Eviction

from tests.scale.run import Plan, run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.COST])
def test_200_adapters(eviction: Eviction, tmp_path: Path) -> None:
    """Whoever gives way. To see it fail: let Forwards._forward pass over both calls of check_current."""
    planes = ("stream", "ring", "direct")
    theory_is_exact = eviction is Eviction.LRU
    outcome = run(Plan(adapters=200, requests=600, planes=planes, eviction=eviction), tmp_path)
    faults = [fault for fault in outcome.faults() if theory_is_exact or "hit ratio" not in fault]
    assert faults == []
    assert outcome.rows >= 2 * 600
    assert 8 < outcome.fills < 600


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_10_000_adapters(tmp_path: Path) -> None:
    """`python -m tests.scale` prints the figures."""
    outcome = run(Plan(), tmp_path)
    print("\n".join(outcome.lines()))
    assert outcome.faults() == []
