"""Injected pods as they were accepted, and the documentation's table: `make golden-k8s` accepts a change of either."""

from __future__ import annotations

import pytest

from tests.k8s.golden import FOLDER, PAGE, injected_text, page_with_table
from tests.k8s.pods import GOOD


@pytest.mark.parametrize("name", GOOD)
def test_an_injected_pod_is_as_it_was_accepted(name: str) -> None:
    assert injected_text(name) == (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(GOOD)


def test_the_table_of_annotations_is_fresh() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_with_table(text) == text
