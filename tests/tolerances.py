"""How far a result may be from float64 truth, per dtype of the result: the one table.

Inputs are scaled so that results are of the order of 1. A 16-bit result is a float32 sum, rounded once, so it is off by
half a unit in its last place and by what float32 is off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    relative: float
    absolute: float


TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2**-11, 1e-5),
    torch.bfloat16: Tolerance(2**-8, 1e-5),
}


def assert_close(found: torch.Tensor, truth: torch.Tensor) -> None:
    """`found` is float64 `truth` within the tolerance of its own dtype."""
    relative, absolute = TOLERANCES[found.dtype]
    assert truth.dtype == torch.float64
    torch.testing.assert_close(found.to(torch.float64), truth, rtol=relative, atol=absolute)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bit for bit, so that -0.0 is not 0.0, and a NaN equals itself and no other."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.contiguous().view(torch.uint8).equal(wanted.contiguous().view(torch.uint8))
