"""Faults of kernels, as far as one that runs on the CPU can have them."""

from __future__ import annotations

import pytest
import torch
from slotcar_kernels.cpu import lora_forward
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.reference import lora_rows
from slotcar_kernels.sites import SiteSlots
from slotcar_sidecar.core.ids import SlotId

from tests.fakes.weights import fake_weights
from tests.kernels.cases import Entries, padded, rows_of, site_slots
from tests.tolerances import assert_close, assert_same_bits
from tests.unit.museum.shared import SPEC, delta, device, kernel, truth


def test_offsets_beyond_31_bits() -> None:
    """vllm#53028. Rows and slots that begin at element 2³¹ are found; no more than a few pages are touched.

    To see it fail: make Plan.order int32, and index x, a and b flat by row × stride.
    """
    far, inputs, outputs = 1 << 30, 40, 24
    generator = torch.Generator().manual_seed(4)

    def spread(rows: int, columns: int) -> torch.Tensor:
        """[3, rows, columns] whose last part begins at element 2³¹."""
        flat = torch.empty(2 * far + rows * columns, dtype=torch.float16)
        parts = flat.as_strided((3, rows, columns), (far, columns, 1))
        parts.copy_(torch.randn(3, rows, columns, generator=generator) * 0.2)
        return parts

    site = SiteSlots(spread(4, inputs), spread(4, outputs), [4, 4, 4], [1.0, 2.0, 3.0])
    x = spread(1, inputs)[:, 0].float()
    far_x = torch.empty(2 * far + inputs, dtype=torch.float16).as_strided((3, inputs), (far, 1)).copy_(x)
    entries: Entries = [(2, 1), (0, 1), (2, 1)]
    out = torch.empty(3, outputs, dtype=torch.float16)
    lora_forward(plan_rows(entries), far_x, [site], [out])
    assert_close(out, lora_rows(entries, far_x, site))


@pytest.mark.parametrize("rank", [1, 15, 16, 17, 32])
def test_ranks_around_a_block(rank: int) -> None:
    """vllm#49327. A rank below, at or above a multiple of 16 is computed whole, and nothing beyond it.

    To see it fail: compute with the padded rank and write no zeros in CpuDevice.fill.
    """
    target, weights = device(), fake_weights(SPEC, {"k": rank, "q": max(1, rank - 1)}, seed=rank)
    target.fill(SlotId(0), weights)
    for site in SPEC.sites:
        x, found = delta(target, 0, site)
        assert_close(found, truth(weights, site, x))


def test_padded_ranks_hold_nothing_of_the_evicted_adapter() -> None:
    """sglang#27087. From the rank to the padded rank a slot is zero, whatever was there.

    To see it fail: write no zeros from the rank to the padded rank in CpuDevice.fill.
    """
    target, slot, small = device(), SlotId(0), fake_weights(SPEC, {"k": 3, "q": 3}, seed=6)
    target.fill(slot, fake_weights(SPEC, {"k": 32, "q": 32}, seed=5))
    target.fill(slot, small)
    assert target.matches(slot, small)
    for site in ("k", "q"):
        assert not target._arrays[site].a[slot, 3:16].any()
        assert not target._arrays[site].b[slot, 3:16].any()


@pytest.mark.parametrize("entries", [[], [(0, 0)], [(None, 0), (4, 0)], [(5, 2)], [(None, 3)], [(4, 0), (None, 1)]])
def test_empty_segments_and_rank_0(entries: Entries) -> None:
    """sglang#7785. Entries without rows and a slot of rank 0, the fifth, give zeros.

    To see it fail: divide by the rank, or by the rows of a segment, in _compute.
    """
    site = site_slots(24, 20)
    x = torch.ones(rows_of(entries), 24)
    assert_same_bits(kernel(entries, x, site), torch.zeros(x.shape[0], 20))


def test_rows_that_are_not_next_to_each_other() -> None:
    """vllm#36187. An input with gaps between its rows, or that begins in the middle of others, is read by its strides.

    To see it fail: read x by x.data_ptr() and the number of its columns.
    """
    site = site_slots(24, 20)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(7))
    batches: list[Entries] = [[(0, 1), (4, 2), (0, 2)], [(0, 3), (4, 2)]]
    for entries in batches:
        for strided in (padded(x).view, torch.stack([x, x], 1)[:, 1], x.repeat(1, 2)[:, 24:]):
            assert_same_bits(kernel(entries, strided, site), kernel(entries, x, site))
