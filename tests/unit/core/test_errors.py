"""What is said about a refusal is bounded and cannot break a header or a log line."""

from __future__ import annotations

import pytest
from slotcar_sidecar.core.errors import AdapterNotFound, RequestInvalid, SlotcarError


@pytest.mark.parametrize("text", ["x" * 10_000_000, "é" * 1000, "\ud800" * 1000, "a\nb\0c\u2028d\x9b" * 100])
def test_hostile_text_is_cut_and_tamed(text: str) -> None:
    error = RequestInvalid("name", found=text, wanted="less")
    for said in (error.message, str(error), *error.facts.values()):
        assert len(said.encode()) <= 503
        assert said.isprintable()
    assert error.facts["found"].endswith("…")


def test_plain_text_is_left_alone() -> None:
    error = SlotcarError("64 → 65", tensor="a.b", nothing=None)
    assert error.message == "64 → 65"
    assert error.facts == {"tensor": "a.b"}


def test_a_list_of_many_is_cut_too() -> None:
    error = AdapterNotFound(*range(100_000))
    assert error.facts["adapters"].startswith("0, 1, 2")
    assert len(error.message.encode()) <= 503
