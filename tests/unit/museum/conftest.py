"""Every exhibit is looked at over each plane."""

from __future__ import annotations

import pytest

from tests.fakes.parts import Bench


@pytest.fixture(autouse=True, params=["unary", "ring", "direct"])
def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The plane of each bench that the test makes."""
    chosen: str = request.param
    monkeypatch.setattr(Bench, "plane", chosen)
    return chosen
