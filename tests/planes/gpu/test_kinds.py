"""Sites of every kind by a client that computes on the slots' GPU: test_kinds' tests, and the bits of the ring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import slotcar_client
import torch
from slotcar_client import BASE

from tests.planes import kinds
from tests.planes.gpu.sidecar import GpuSidecar
from tests.planes.kinds import EXPERTS, HIDDEN, INNER
from tests.planes.test_kinds import (
    Served,
    Stage,
    random,
    test_an_aux_that_is_missing_is_refused,
    test_an_embedding_has_ids,
    test_base_is_added_and_its_bits_kept_for_the_base_model,
    test_experts_of_each_row,
    test_kinds_in_one_call,
    test_no_rows_of_any_kind,
    test_packed_parts_of_each_rank,
    test_the_ranks_outputs_of_a_row_shard_sum_up_to_the_delta_with_one_bias,
    test_what_does_not_fit_is_refused_before_it_is_sent,
)

__all__ = [
    "test_an_aux_that_is_missing_is_refused",
    "test_an_embedding_has_ids",
    "test_base_is_added_and_its_bits_kept_for_the_base_model",
    "test_experts_of_each_row",
    "test_kinds_in_one_call",
    "test_no_rows_of_any_kind",
    "test_packed_parts_of_each_rank",
    "test_the_ranks_outputs_of_a_row_shard_sum_up_to_the_delta_with_one_bias",
    "test_what_does_not_fit_is_refused_before_it_is_sent",
]

ENTRIES = ["packed", BASE, "biased", "whole", "experts"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    tensors = kinds.write_adapters(root)
    with (
        GpuSidecar(tmp_path_factory.mktemp("s"), root, slots=6) as sidecar,
        slotcar_client.connect(sidecar.target, timeout_seconds=120) as client,
        client.session("shape", model_spec=kinds.model()),
    ):
        refs = {name: f"{name}@{client.load(name, root / name).digest}" for name in tensors}
        yield client, refs, tensors


@pytest.fixture(params=["direct"])
def stage(request: pytest.FixtureRequest, served: Served) -> Iterator[Stage]:
    client, refs, tensors = served
    with (
        client.session("engine", model_spec=kinds.model(), ranks=2, transport=request.param) as first,
        client.join(first.session_id, 1, transport=request.param) as second,
    ):
        assert (first.transport, second.transport) == (request.param, request.param)
        yield Stage(client, (first, second), refs, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("counts", [(2, 1, 3, 2, 1), (9, 2, 0, 6, 1)])
def test_the_bits_are_those_of_the_ring(served: Served, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    client, refs, _ = served
    rows = sum(counts)
    x = random(1, rows, HIDDEN).to(dtype)
    numbers = torch.arange(rows) % EXPERTS
    inputs = {"attn.qkv": x, "plain": x, "moe.experts.gate_up_proj": x}
    aux = {"moe.experts.gate_up_proj": numbers, "embed": numbers}
    base = {"plain": random(2, rows, INNER).to(dtype)}
    found = {}
    for transport in ("ring", "direct"):
        with client.session("engine", model_spec=kinds.model(), transport=transport) as session:
            session.set_mapping([name if name is BASE else refs[str(name)] for name in ENTRIES])
            found[transport] = [session.forward(inputs, counts, aux=aux), session.forward({"plain": x}, counts, base)]
    for ring, direct in zip(found["ring"], found["direct"], strict=True):
        assert ring.keys() == direct.keys()
        assert all(torch.equal(ring[site], direct[site]) for site in ring)
