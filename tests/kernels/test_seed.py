"""seed = base + (gain ⊙ y + bias): against float64, with NaN wherever a slot has no vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from slotcar_kernels.cpu import Kernel
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.seed import BIAS, GAIN, prepare, uses_vectors

from tests.kernels.cases import Entries, padded
from tests.tolerances import assert_close, assert_same_bits

FLAGS = (0, GAIN, BIAS, GAIN | BIAS)
ENTRIES: Entries = [(3, 2), (None, 1), (0, 1), (1, 2), (2, 1), (3, 1), (None, 2)]
ROWS = 10
WIDTHS = (1, 7, 16, 67)


def vectors(width: int, flags: Sequence[int] = FLAGS) -> torch.Tensor:
    """[S, 2, width], NaN where the flags name no vector; between other numbers, as in a slot."""
    values = torch.randn(len(flags), 2, width + 3, generator=torch.Generator().manual_seed(1))
    for slot, flag in enumerate(flags):
        for row, bit in enumerate((GAIN, BIAS)):
            if not flag & bit:
                values[slot, row] = math.nan
    return values[:, :, :width]


def matrix(width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(values: torch.Tensor, base: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor:
    slots = [slot for slot, count in ENTRIES for _ in range(count)]
    rows = []
    for row, slot in enumerate(slots):
        sum_ = torch.zeros(values.shape[2], dtype=torch.float64) if base is None else base[row].double()
        if slot is not None and FLAGS[slot] & BIAS:
            sum_ = sum_ + values[slot, 1].double()
        if slot is not None and FLAGS[slot] & GAIN:
            assert y is not None
            sum_ = sum_ + values[slot, 0].double() * y[row].double()
        rows.append(sum_)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("mode", ["add", "delta", "in place"])
def test_against_float64(kernel: Kernel, dtype: torch.dtype, width: int, mode: str) -> None:
    values, y = vectors(width), matrix(width, dtype, 2)
    y_padded, out = padded(y), padded(torch.full_like(y, math.nan) if mode != "in place" else y)
    base = None if mode == "delta" else y_padded.view if mode == "add" else out.view
    prepare(plan_rows(ENTRIES), (values, FLAGS), out.view, base, y_padded.view if base is None else base, kernel)()
    wanted = truth(values, None if mode == "delta" else y, y)
    assert_close(out.view, wanted)
    out.assert_rest_untouched()
    for row in (2, 3, 8, 9):
        assert_same_bits(out.view[row], torch.zeros_like(y[row]) if mode == "delta" else y[row])


def test_rows_without_a_vector_keep_their_bits_and_infinities_do_not_spread(kernel: Kernel) -> None:
    """A slot with a bias alone adds it to what the base has; nothing is multiplied by a gain that it has not got."""
    base = torch.tensor([[-0.0, math.inf, 1.0], [math.nan, -0.0, -math.inf], [math.inf, 2.0, -0.0]])
    values, out = torch.full((2, 2, 3), math.nan), torch.empty(3, 3)
    values[1, 1] = 1.0
    prepare(plan_rows([(None, 1), (0, 1), (1, 1)]), (values, (0, BIAS)), out, base, base, kernel)()
    assert_same_bits(out[:2], base[:2])
    assert out[2].tolist() == [math.inf, 3.0, 1.0]


def test_a_row_has_the_same_bits_in_every_batch(kernel: Kernel) -> None:
    values, y = vectors(67), matrix(67, torch.bfloat16, 3)
    together, alone = torch.empty_like(y), torch.empty_like(y)
    prepare(plan_rows(ENTRIES), (values, FLAGS), together, y, y, kernel)()
    for row, slot in enumerate(slot for slot, count in ENTRIES for _ in range(count)):
        one = slice(row, row + 1)
        prepare(plan_rows([(slot, 1)]), (values, FLAGS), alone[one], y[one], y[one], kernel)()
    assert_same_bits(together, alone)


def test_what_does_not_fit_is_refused(kernel: Kernel) -> None:
    plan, out = plan_rows([(1, 2)]), torch.zeros(2, 4)
    good = torch.zeros(2, 2, 4)
    for values, y in (
        (good[:1], out),
        (good.double(), out),
        (torch.zeros(2, 3, 4), out),
        (torch.zeros(2, 2, 5), out),
        (good, None),
        (good, out[:, :3]),
        (good, out.half()),
    ):
        with pytest.raises(ValueError, match=r"wanted|given"):
            prepare(plan, (values, (0, GAIN)), out, None, y, kernel)


def test_plain_lora_needs_no_seed() -> None:
    assert not uses_vectors(plan_rows([(0, 3), (None, 1)]), FLAGS)
    assert uses_vectors(plan_rows([(0, 3), (2, 1)]), FLAGS)
    assert not uses_vectors(plan_rows([(0, 3), (2, 0)]), FLAGS)
