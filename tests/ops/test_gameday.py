"""Two scenarios of the game day, faster still, so that it is there when it is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.gameday import report
from tests.ops.gameday.pace import Pace
from tests.ops.gameday.panels import panels_of
from tests.ops.gameday.scenarios import SCENARIOS, Scenario
from tests.ops.gameday.stage import stage

pytestmark = [pytest.mark.ops, pytest.mark.timeout(300)]

PACE = Pace(60)
ALERTS = {"thrash": "SlotcarThrash", "corrupt adapter": "SlotcarLoadsFailing"}


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each.name in ALERTS], ids=lambda each: each.name)
def test_a_trouble_is_named_in_all_four_places(scenario: Scenario, prometheus_binary: str, tmp_path: Path) -> None:
    with stage(tmp_path / "scenario-0", PACE, prometheus_binary) as place:
        (seen,) = scenario.play(place)
    assert seen.alert.name == ALERTS[scenario.name]
    assert {panel.title for panel in seen.panels} <= {panel.title for panel in panels_of(seen.alert.name)}
    page = tmp_path / "gameday.md"
    report.write_page(page, [report.Played(scenario.name, scenario.does, 1.0, (seen,))], PACE)
    text = page.read_text(encoding="utf-8")
    assert place.address not in text
    assert str(tmp_path) not in text
    assert seen.panels[0].title in text
