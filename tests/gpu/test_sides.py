"""Each side that is timed computes the step's LoRA."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.gpu import measure, sides
from tests.gpu.atomics import SETTINGS
from tests.gpu.measure import check
from tests.gpu.place import DEVICE
from tests.gpu.report import Case, table
from tests.gpu.sides import Launch, Step, atomics_side, slotcar_side, torch_side

pytestmark = pytest.mark.gpu

CASES = [Case(1, 1, 16, 128), Case(20, 3, 48, 264)]


def launches_of_slotcar(step: Step) -> list[Launch]:
    plan, launches = slotcar_side(step)
    plan()
    return launches


@pytest.mark.parametrize("make", [launches_of_slotcar, torch_side])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_and_torch(case: Case, make: Callable[[Step], list[Launch]]) -> None:
    step = Step.of(case, fewest_bytes=0)
    check(step, make(step))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_atomics(case: Case, setting: object) -> None:
    step = Step.of(case, fewest_bytes=0)
    check(step, atomics_side(step, setting))  # type: ignore[arg-type]


def test_the_slots_of_a_step_are_more_than_caches_have() -> None:
    for case, sites in ((Case(1, 1, 16, 16), 8), (Case(1, 1, 16, 256), 8)):
        assert len(Step.of(case, fewest_bytes=0).sites) == sites
    many = Step.of(Case(1, 1, 16, 256), fewest_bytes=1e6)
    assert len(many.sites) * many.case.weight_bytes >= 1e6
    assert len({site.a.data_ptr() for site in many.sites}) == len(many.sites)


class Launched(measure.Timed):
    """Launches everything once, and says that a replay took as many microseconds as it has launches."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.count, self.seconds = len(launches), []
        for launch in launches:
            launch()

    def round(self) -> float:
        return self.count / 1e6


def test_a_measurement_from_its_sides_to_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "FEWEST_SITES", 2)
    monkeypatch.setattr(sides, "FEWEST_BYTES", 0)

    def fails(step: Step) -> list[Launch]:
        raise RuntimeError("of torch")

    monkeypatch.setattr(measure, "torch_side", fails)
    result = measure.measure(Case(2, 1, 16, 32), 1e12, Launched).to_dict()
    assert result["us"] == {"slotcar": 1, "plan": 1, "atomics": 1} | {f"atomics {each.name}": 1 for each in SETTINGS}
    assert result["empty_pair_us"] == 2
    assert result["errors"] == {"torch": "RuntimeError: of torch"}
    assert "| 2/1 | 16 |" in table({}, [], [result])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="there are no graphs without a GPU")
def test_a_graph_is_timed() -> None:
    step = Step.of(CASES[0], fewest_bytes=0)
    timed = measure.Timed(launches_of_slotcar(step))
    assert timed.round() > 0
