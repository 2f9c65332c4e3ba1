"""Weights of fused experts: a file and a configuration that do not agree on the parameters are refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save
from slotcar_sidecar.core.errors import AdapterInvalid, AdapterUnsupported

from tests.adapters import raw_tensors
from tests.unit.store.test_refusals import config, refusal

EXPERTS = "model.layers.0.mlp.experts"
NESTED = [f"{EXPERTS}.base_layer", EXPERTS]
DISAGREEING: list[tuple[list[str], list[str], str]] = [
    (NESTED, [], "names none"),
    (NESTED, ["mlp.experts.gate_up_proj"], "names gate_up_proj"),
    ([EXPERTS], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "down_proj"),
    ([f"{EXPERTS}.base_layer"], ["mlp.experts.gate_up_proj"], "nested 1 deep"),
]


@pytest.mark.parametrize(("sites", "targets", "says"), DISAGREEING)
def test_experts_that_the_configuration_does_not_name(sites: list[str], targets: list[str], says: str) -> None:
    error = refusal(config(target_parameters=targets), save(raw_tensors(*sites)))
    assert isinstance(error, AdapterInvalid)
    assert error.facts["field"] == "target_parameters"
    assert says in error.message


@pytest.mark.parametrize("target", ["experts.\ud800", "\x1b]0;title\x07.down_proj", "a\nb", "é"])
def test_names_of_parameters_are_such_as_keys_may_have(target: str) -> None:
    """They are answered and shown; what UTF-8 does not have could be neither."""
    error = refusal(config(target_parameters=[target]), save(raw_tensors("q")))
    assert isinstance(error, AdapterInvalid)
    assert (error.facts["field"], error.message.isprintable()) == ("target_parameters", True)


def test_parameters_whose_order_is_not_known() -> None:
    error = refusal(config(target_parameters=["experts.w1", "experts.v1"]), save(raw_tensors(*NESTED)))
    assert isinstance(error, AdapterUnsupported)
    assert error.facts["field"] == "target_parameters"


def test_experts_whose_rows_are_no_multiple_of_the_rank() -> None:
    tensors = raw_tensors(EXPERTS, rank=6)
    error = refusal(config(target_parameters=["experts.down_proj"]), save(tensors))
    assert (error.facts["field"], error.facts["wanted"]) == ("r", "a multiple of 4")


def test_a_vector_at_experts() -> None:
    tensors = raw_tensors(EXPERTS, rank=8) | {f"{EXPERTS}.lora_B.bias": torch.ones(64)}
    error = refusal(config(target_parameters=["experts.down_proj"], lora_bias=True), save(tensors))
    assert isinstance(error, AdapterUnsupported)
    assert error.facts["tensor"] == f"{EXPERTS}.lora_B.bias"
