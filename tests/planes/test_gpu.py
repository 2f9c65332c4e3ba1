"""Sites of every kind on the planes of a server with a GPU: the device over the CPU's memory, its kernels interpreted.

The tests are test_kinds'; the server is one of its own, which has Triton, as test_gpu_direct's clients have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import slotcar_client

from tests.kernels.triton.environment import FOLDER, INSTALLED, version_or_skip
from tests.planes import kinds
from tests.planes.test_kinds import (
    Served,
    Stage,
    test_an_embedding_has_ids,
    test_base_is_added_and_its_bits_kept_for_the_base_model,
    test_experts_of_each_row,
    test_indices_in_a_shared_arena_are_checked_where_they_are_read,
    test_kinds_in_one_call,
    test_no_rows_of_any_kind,
    test_packed_parts_of_each_rank,
    test_the_ranks_outputs_of_a_row_shard_sum_up_to_the_delta_with_one_bias,
)
from tests.server import SidecarProcess

__all__ = [
    "test_an_embedding_has_ids",
    "test_base_is_added_and_its_bits_kept_for_the_base_model",
    "test_experts_of_each_row",
    "test_indices_in_a_shared_arena_are_checked_where_they_are_read",
    "test_kinds_in_one_call",
    "test_no_rows_of_any_kind",
    "test_packed_parts_of_each_rank",
    "test_the_ranks_outputs_of_a_row_shard_sum_up_to_the_delta_with_one_bias",
]

pytestmark = pytest.mark.timeout(600)


@dataclass
class GpuSidecar(SidecarProcess):
    """With Triton's interpreter, whose kernels run in one thread at a time."""

    def command(self) -> list[str]:
        return ["tests.gpu.serve" if part == "slotcar_sidecar" else part for part in super().command()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    version, root = version_or_skip(), tmp_path_factory.mktemp("adapters")
    folders = [os.environ.get("PYTHONPATH", ""), *([] if version == INSTALLED else [str(FOLDER / version)])]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    tensors = kinds.write_adapters(root)
    with (
        GpuSidecar(
            tmp_path_factory.mktemp("s"), root, slots=6, extra=("--device", "cuda"), environment=environment
        ) as sidecar,
        slotcar_client.connect(sidecar.target, timeout_seconds=120) as client,
        client.session("shape", model_spec=kinds.model()),
    ):
        refs = {name: f"{name}@{client.load(name, root / name).digest}" for name in tensors}
        yield client, refs, tensors


@pytest.fixture(params=["stream", "ring"])
def stage(request: pytest.FixtureRequest, served: Served) -> Iterator[Stage]:
    client, refs, tensors = served
    with (
        client.session("engine", model_spec=kinds.model(), ranks=2, transport=request.param) as first,
        client.join(first.session_id, 1, transport=request.param) as second,
    ):
        yield Stage(client, (first, second), refs, tensors)


@pytest.mark.skipif(find_spec("triton") is not None, reason="this process has Triton")
def test_without_triton_there_is_no_direct_plane(served: Served) -> None:
    client, _, _ = served
    why = "cannot be read here: Triton is not installed"
    with client.session("engine", model_spec=kinds.model(), transport="auto") as session:
        assert session.transport == "ring"
        assert why in session.transport_reason
    with pytest.raises(slotcar_client.RequestInvalid, match=why):
        client.session("engine", model_spec=kinds.model(), transport="direct")
