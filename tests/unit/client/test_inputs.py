"""Sites that share an input are asked for together, and no delta is ever used for another input."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
from slotcar_client import Mapping
from slotcar_client.engines.inputs import SharedInputs
from slotcar_client.values import LayoutVersion

MAPPING = Mapping(2, LayoutVersion("e", 1), (), {}, None)


class Asked:
    """Answers with a tensor that says which site and which x it is for."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.inputs = SharedInputs(self._ask)

    def _ask(self, mapping: Mapping, sites: Sequence[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.append(list(sites))
        return {site: x.clone() * len(site) for site in sites}

    def check(self, site: str, x: torch.Tensor, mapping: Mapping = MAPPING) -> None:
        delta = self.inputs.delta(site, x, mapping, lambda _: True)
        assert torch.equal(delta, x * len(site)), f"{site} got the delta of another input"

    def run_pass(self, *sites: str) -> torch.Tensor:
        x = torch.randn(3)
        for site in sites:
            self.check(site, x)
        return x

    def new_calls(self) -> list[list[str]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_the_second_pass_asks_once_for_all_that_share_an_input(asked: Asked) -> None:
    asked.run_pass("q", "kk", "vvv")
    asked.run_pass("oooo")
    assert asked.new_calls() == [["q"], ["kk"], ["vvv"], ["oooo"]]
    for _ in range(2):
        asked.run_pass("q", "kk", "vvv")
        asked.run_pass("oooo")
        assert asked.new_calls() == [["q", "kk", "vvv"], ["oooo"]]


def test_equal_contents_in_another_tensor_are_another_input(asked: Asked) -> None:
    x = asked.run_pass("q", "kk")
    asked.new_calls()
    asked.check("q", x.clone())
    asked.check("kk", x.clone())
    assert asked.new_calls() == [["q", "kk"], ["kk"]]


def test_an_input_that_was_written_in_between_is_another_input(asked: Asked) -> None:
    asked.run_pass("q", "kk")
    x = torch.randn(3)
    asked.check("q", x)
    x.add_(1)
    asked.check("kk", x)


def test_inference_tensors_are_compared_by_contents(asked: Asked) -> None:
    with torch.inference_mode():
        asked.run_pass("q", "kk")
        asked.new_calls()
        asked.run_pass("q", "kk")
        assert asked.new_calls() == [["q", "kk"]]
        x = torch.randn(3)
        asked.check("q", x)
        x.add_(1)
        asked.check("kk", x)


def test_a_new_tensor_at_the_address_of_a_dead_one_is_another_input(asked: Asked) -> None:
    asked.run_pass("q", "kk")
    for value in range(50):
        x = torch.full((3,), float(value))
        asked.check("q", x)
        del x
        asked.check("kk", torch.full((3,), -float(value)))


def test_another_mapping_gets_nothing_of_the_one_before(asked: Asked) -> None:
    asked.run_pass("q", "kk")
    x = asked.run_pass("q")
    assert asked.new_calls()[-1] == ["q", "kk"]
    asked.check("kk", x, Mapping(2, LayoutVersion("e", 2), (), {}, None))
    assert asked.new_calls() == [["kk"]]


def test_a_delta_is_used_once(asked: Asked) -> None:
    asked.run_pass("q", "kk")
    asked.new_calls()
    asked.run_pass("q", "kk", "kk", "q")
    assert asked.new_calls() == [["q", "kk"], ["kk"], ["q"]]
    asked.run_pass("q", "kk")
    assert asked.new_calls() == [["q", "kk"]]


def test_a_site_that_comes_with_another_input_now_and_then_is_right_each_time(asked: Asked) -> None:
    asked.run_pass("q", "kk")
    asked.run_pass("q")
    asked.run_pass("kk")
    asked.run_pass("kk", "q")
    asked.run_pass("q", "kk")


def test_siblings_that_are_not_wanted_are_not_asked_for(asked: Asked) -> None:
    asked.run_pass("q", "kk", "vvv")
    asked.new_calls()
    asked.inputs.delta("q", torch.randn(3), MAPPING, lambda site: site != "kk")
    assert asked.new_calls() == [["q", "vvv"]]


def test_a_failed_question_leaves_nothing_behind(asked: Asked) -> None:
    x = asked.run_pass("q", "kk")
    asked.check("q", x)

    def refuse(*_: object) -> dict[str, torch.Tensor]:
        raise RuntimeError("refused")

    asked.inputs._ask = refuse
    with pytest.raises(RuntimeError):
        asked.inputs.delta("q", torch.randn(3), MAPPING, lambda _: True)
    with pytest.raises(RuntimeError):
        asked.inputs.delta("kk", x, MAPPING, lambda _: True)


def test_no_input_is_kept_alive(asked: Asked) -> None:
    x = asked.run_pass("q", "kk")
    gone = weakref.ref(x)
    del x
    assert gone() is None
