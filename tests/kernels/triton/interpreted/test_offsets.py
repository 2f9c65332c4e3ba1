"""Rows, slots and tokens more than 2³¹ elements from the first, at smaller strides, in memory hardly touched."""

from __future__ import annotations

import math
import mmap

import pytest
import torch
from slotcar_kernels.reference import lora_rows
from slotcar_kernels.sites import SiteSlots
from slotcar_kernels.triton import BatchPlan, SiteCall, prepare

from tests.kernels.cases import Entries, site_slots
from tests.kernels.triton.interpreted.batch import CPU, on_device, slots_by_row
from tests.kernels.triton.interpreted.test_by_aux import embedding
from tests.tolerances import assert_close

FAR = 2**30 + 64  # elements: the fourth row's offset does not fit into 32 bits, while the stride does
MAP_NORESERVE = 0x4000  # Linux's; Python has no name for it before 3.13
ENTRIES: Entries = [(3, 1), (0, 2), (3, 1)]
COUNT = 4  # of rows, slots and tokens


def far_apart(values: torch.Tensor) -> torch.Tensor:
    """The same values, with each of the first dimension FAR elements behind the last."""
    length = ((len(values) - 1) * FAR + values[0].numel()) * values.itemsize
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    flat = torch.frombuffer(memory, dtype=values.dtype)
    far = flat.as_strided(values.shape, (FAR, *values[0].contiguous().stride()))
    far.copy_(values)
    return far


def run(site: SiteSlots, x: torch.Tensor | None, out: torch.Tensor, aux: torch.Tensor | None = None) -> torch.Tensor:
    plan = BatchPlan.of_bucket(COUNT, COUNT, CPU)
    prepared = prepare(plan, SiteCall([on_device(site)], out, x, None, aux))
    plan.write(slots_by_row(ENTRIES))
    plan.execute()
    prepared.execute()
    return out


def nothing() -> torch.Tensor:
    return torch.full((COUNT, 40), math.nan, dtype=torch.bfloat16)


@pytest.mark.parametrize("what", ["a", "b", "x", "out"])
def test_far_apart(what: str) -> None:
    site = site_slots(64, 40, torch.bfloat16, ranks=(16, 7, 0, 3))
    site = SiteSlots(site.a[:COUNT], site.b[:COUNT], site.ranks[:COUNT], site.scales[:COUNT])
    x = torch.randn(COUNT, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    wanted = lora_rows(ENTRIES, x, site)
    tensors = {"a": site.a, "b": site.b, "x": x, "out": nothing()}
    tensors[what] = far_apart(tensors[what])
    moved = SiteSlots(tensors["a"], tensors["b"], site.ranks, site.scales)
    assert_close(run(moved, tensors["x"], tensors["out"]), wanted)


def test_tokens_far_apart() -> None:
    """Every slot has the A of one, whose fourth token is far from the first."""
    site = embedding(40, torch.bfloat16)
    a = far_apart(site.a[1, :COUNT]).unsqueeze(0).expand(COUNT, -1, -1)
    b = site.b[1:2].expand(COUNT, -1, -1)
    site = SiteSlots(a, b, (site.ranks[1],) * COUNT, (site.scales[1],) * COUNT, embedding=True)
    ids = torch.tensor([[3], [0], [3], [1]], dtype=torch.int32)
    assert_close(run(site, None, nothing(), ids), lora_rows(ENTRIES, ids[:, 0].long(), site))
