"""A module's value is the one that PEFT's own rule gives, or the pattern is refused before it is matched."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported
from slotcar_sidecar.store.patterns import values_by_pattern

MODULES = [
    f"model.layers.{layer}.{part}" for layer in (0, 1, 10) for part in ("self_attn.q_proj", "mlp.up_proj", "gate")
]

PATTERNS = [
    {"q_proj": 1},
    {"layers.1": 1, "gate": 2},
    {"proj": 1},
    {"self_attn.q_proj": 1, ".*": 2},
    {r"layers\.\d\..*": 1, r"layers\.\d+\.gate": 2},
    {r"^model.layers.0.gate$": 1},
    {r"(self_attn|mlp)\.(q|up)_proj": 1},
    {r"(?:layers\.(0|1)\.)gate": 1},
    {r"[a-z_]+": 1},
    {r"[^m]+?proj": 1},
    {"q_proj|gate": 1},
    {"model.layers.0.gate": 1, "model.layers.10.gate": 2},
    {"": 1},
]


@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
def test_the_value_is_pefts(patterns: dict[str, int]) -> None:
    wanted = {module: patterns.get(get_pattern_key(list(patterns), module), 0) for module in MODULES}
    result = values_by_pattern("rank_pattern", patterns, 0, MODULES)
    assert result.values == wanted
    assert set(result.unused).isdisjoint(get_pattern_key(list(patterns), module) for module in MODULES)


@settings(max_examples=100)
@given(st.dictionaries(st.text(alphabet=r"abq.\d*+?()|[]^$-", max_size=12), st.integers(), max_size=3))
def test_any_pattern_is_matched_as_by_peft_or_refused(patterns: dict[str, int]) -> None:
    modules = ["a.b", "ab.q", "q", "b-d.a.a"]
    try:
        result = values_by_pattern("rank_pattern", patterns, 0, modules)
    except (AdapterInvalid, AdapterUnsupported):
        return
    assert result.values == {module: patterns.get(get_pattern_key(list(patterns), module), 0) for module in modules}


HOSTILE = [
    "(a+)+b",
    "(a*)*b",
    "(a|a)*b",
    "(ab)?",
    "((a)+b)?",
    "(a|aa)" * 30,
    "a?" * 30,
    ".*" * 4,
    ".*" * 5,
    "(?=a)",
    "(?P<x>a)",
    r"(a)\1",
    "(?i)a",
    "a{3}",
    "a**",
    "a++",
    r"\Z",
    "a" * 501,
    "(" * 11 + ")" * 11,
    "a b",
    "a\n",
]


@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda pattern: repr(pattern[:20]))
def test_a_pattern_that_could_take_long_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(AdapterUnsupported) as caught:
        values_by_pattern("alpha_pattern", {pattern: 1}, 0, ["a" * 60])
    assert caught.value.facts["field"] == "alpha_pattern"
    assert caught.value.facts["found"]


def test_too_many_patterns_for_too_many_modules_are_refused() -> None:
    patterns = {f"layers.{index}.q_proj": 1 for index in range(5000)}
    with pytest.raises(AdapterUnsupported) as caught:
        values_by_pattern("rank_pattern", patterns, 0, [f"model.layers.{index}.q_proj" for index in range(5000)])
    assert caught.value.facts["found"] == "5000 patterns for 5000 modules"
