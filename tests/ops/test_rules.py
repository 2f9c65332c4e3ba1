"""promtool reads the rules, and sees each alert fire for its cause and for nothing else."""

from __future__ import annotations

import pytest

from tests.ops.conftest import Promtool

pytestmark = pytest.mark.ops

RULES = "deploy/prometheus/slotcar.rules.yaml"


def test_the_rules_are_sound(promtool: Promtool) -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_each_alert_fires_for_its_cause(promtool: Promtool) -> None:
    """To see it fail: raise a threshold in the rules."""
    assert "SUCCESS" in promtool("test", "rules", "tests/ops/slotcar.rules.test.yaml")
