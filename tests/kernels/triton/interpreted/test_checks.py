"""What does not fit is refused by `prepare`, with what was found and wanted, before any launch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from slotcar_kernels.triton import BatchPlan, SiteCall, SlicePart, check_ranks, planes_elements, prepare

from tests.kernels.triton.interpreted.batch import CPU

BUCKET, SLOTS, RANK, IN, OUT = 16, 3, 32, 64, 40
BFLOAT16 = torch.bfloat16


def part(**changes: Any) -> SlicePart:
    fields = {
        "a": torch.zeros(SLOTS, RANK, IN, dtype=BFLOAT16),
        "b": torch.zeros(SLOTS, RANK, OUT, dtype=BFLOAT16),
        "ranks": torch.zeros(SLOTS, dtype=torch.int32),
        "scales": torch.zeros(SLOTS),
    }
    return SlicePart(**fields | changes)


def call(**changes: Any) -> SiteCall:
    fields = {"parts": [part()], "out": zeros(OUT), "x": zeros(IN)}
    return SiteCall(**fields | changes)


def zeros(columns: int, rows: int = BUCKET, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


def misaligned(columns: int) -> torch.Tensor:
    return torch.zeros(BUCKET * columns + 1, dtype=BFLOAT16)[1:].view(BUCKET, columns)


def of_columns(columns: int) -> torch.Tensor:
    """Its first dimension is the contiguous one."""
    return torch.zeros(columns, BUCKET, dtype=BFLOAT16).t()


def shifted_pair() -> dict[str, Any]:
    """A base that begins one row of `out` later."""
    memory = zeros(OUT, BUCKET + 1)
    return {"out": memory[:-1], "base": memory[1:]}


def experts(**changes: Any) -> SlicePart:
    fields = {
        "a": torch.zeros(SLOTS, 2, RANK, IN, dtype=BFLOAT16),
        "b": torch.zeros(SLOTS, 2, RANK, OUT, dtype=BFLOAT16),
        "ranks": torch.zeros(SLOTS * 2, dtype=torch.int32),
        "scales": torch.zeros(SLOTS * 2),
    }
    return SlicePart(**fields | changes)


AUX = torch.zeros(BUCKET, 1, dtype=torch.int32)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no parts": ({"parts": []}, "without parts"),
    "rows of x": ({"x": zeros(IN, BUCKET + 1)}, r"x is \(17, 64\)"),
    "width of x": ({"x": zeros(IN + 8)}, r"x is \(16, 72\)"),
    "rows of out": ({"out": zeros(OUT, BUCKET - 1)}, r"out is \(15, 40\)"),
    "width of out": ({"out": zeros(OUT + 8)}, r"out is \(16, 48\)"),
    "rows of base": ({"base": zeros(OUT, 1)}, r"base is \(1, 40\)"),
    "dtype of x": ({"x": zeros(IN, dtype=torch.float16)}, "x is .* torch.float16"),
    "dtype of base": ({"base": zeros(OUT, dtype=torch.float32)}, "base is .* torch.float32"),
    "a dtype that there is not": (
        {"x": zeros(IN, dtype=torch.float64), "out": zeros(OUT, dtype=torch.float64)},
        "out is torch.float64",
    ),
    "x by columns": ({"x": of_columns(IN)}, "x has strides"),
    "out by columns": ({"out": of_columns(OUT)}, "out has strides"),
    "base by columns": ({"base": of_columns(OUT)}, "base has strides"),
    "x misaligned": ({"x": misaligned(IN)}, "x is at 0x.*, wanted a multiple of 16"),
    "out misaligned": ({"out": misaligned(OUT)}, "out is at 0x"),
    "base misaligned": ({"base": misaligned(OUT)}, "base is at 0x"),
    "rows of out over each other": ({"out": zeros(OUT).as_strided((BUCKET, OUT), (8, 1))}, "rows of out lie over"),
    "base over out": (shifted_pair(), "base lies over"),
    "a and b differ in dtype": ({"parts": [part(b=torch.zeros(SLOTS, RANK, OUT))]}, "a is torch.bfloat16 and b"),
    "parts differ in dtype": (
        {"parts": [part(), part(a=part().a.float(), b=part().b.float())], "out": zeros(2 * OUT)},
        "in all parts",
    ),
    "a and b differ in rank": ({"parts": [part(a=torch.zeros(SLOTS, 16, IN, dtype=BFLOAT16))]}, "same slots and ranks"),
    "a and b differ in slots": ({"parts": [part(a=torch.zeros(2, RANK, IN, dtype=BFLOAT16))]}, "same slots and ranks"),
    "a of two dimensions": ({"parts": [part(a=torch.zeros(RANK, IN, dtype=BFLOAT16))]}, "wanted .S, R, in"),
    "parts differ in rank": (
        {
            "parts": [part(), part(a=part().a[:, :16], b=part().b[:, :16])],
            "out": zeros(2 * OUT),
        },
        "wanted the input and ranks",
    ),
    "slots fewer than the plan's": (
        {"parts": [part(a=part().a[:2], b=part().b[:2], ranks=part().ranks[:2], scales=part().scales[:2])]},
        "2 slots of 1 experts, wanted the plan's 3 of 1",
    ),
    "slots of too large a rank": (
        {
            "parts": [
                part(
                    a=torch.zeros(SLOTS, 272, IN, dtype=BFLOAT16),
                    b=torch.zeros(SLOTS, 272, OUT, dtype=BFLOAT16),
                )
            ]
        },
        "slots of rank 272, wanted 1 to 256",
    ),
    "a part without columns": (
        {"parts": [part(), part(b=torch.zeros(SLOTS, RANK, 0, dtype=BFLOAT16))]},
        "wanted no dimension of 0",
    ),
    "an embedding without tokens": (
        {"x": None, "parts": [part(a=torch.zeros(SLOTS, 0, RANK, dtype=BFLOAT16))], "aux": AUX},
        "wanted no dimension of 0",
    ),
    "a by columns": (
        {"parts": [part(a=torch.zeros(SLOTS, IN, RANK, dtype=BFLOAT16).transpose(1, 2))]},
        "last dimension contiguous",
    ),
    "a rank above the maximum": (
        {"parts": [part(ranks=torch.tensor([0, 33, 0], dtype=torch.int32))]},
        "rank 33 in slot 1, wanted 0 to 32",
    ),
    "a rank below 0": ({"parts": [part(ranks=torch.tensor([0, 0, -1], dtype=torch.int32))]}, "rank -1 in slot 2"),
    "ranks of another dtype": ({"parts": [part(ranks=torch.zeros(SLOTS, dtype=torch.int64))]}, "ranks are"),
    "scales too few": ({"parts": [part(scales=torch.zeros(SLOTS - 1))]}, "scales are"),
    "an embedding without aux": (
        {"x": None, "parts": [part(a=torch.zeros(SLOTS, 9, RANK, dtype=BFLOAT16))]},
        "no aux, wanted one",
    ),
    "experts without aux": ({"parts": [experts()]}, "no aux, wanted one"),
    "a linear site with aux": ({"aux": AUX}, "an aux, wanted none"),
    "aux of another dtype": ({"parts": [experts()], "aux": AUX.long()}, "aux is"),
    "aux too short": ({"parts": [experts()], "aux": AUX[:-1]}, "aux is"),
    "aux with gaps": (
        {"parts": [experts()], "aux": torch.zeros(BUCKET, 2, dtype=torch.int32)[:, :1]},
        "aux has strides",
    ),
    "experts of one part alone": (
        {"parts": [experts(), part()], "aux": AUX, "out": zeros(2 * OUT)},
        "1 experts, wanted the plan's 3 of 2|input and ranks",
    ),
    "another device": ({"x": torch.zeros(BUCKET, IN, dtype=BFLOAT16, device="meta")}, "on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        prepare(BatchPlan.of_bucket(BUCKET, SLOTS, CPU), call(**changes))


@pytest.mark.parametrize(
    "planes",
    [torch.zeros(8), torch.zeros(4096, dtype=BFLOAT16), torch.zeros(4096)[::2], torch.zeros(4097)[1:]],
    ids=["small", "dtype", "gaps", "misaligned"],
)
def test_scratch_that_does_not_fit_is_refused(planes: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="planes"):
        prepare(BatchPlan.of_bucket(BUCKET, SLOTS, CPU), call(), planes)


def test_what_fits_is_taken() -> None:
    plan = BatchPlan.of_bucket(BUCKET, SLOTS, CPU)
    assert planes_elements(plan, call()) == BUCKET * RANK
    for changes in ({}, {"base": zeros(OUT)}, {"parts": [experts()], "aux": AUX}):
        prepare(plan, call(**changes), torch.full((BUCKET * RANK,), math.nan))
    in_place = call()
    prepare(plan, dataclasses.replace(in_place, base=in_place.out))


@pytest.mark.parametrize("rank", [-1, 33])
def test_ranks_on_the_host_are_checked(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} in slot 1, wanted 0 to 32"):
        check_ranks([0, rank], 32)
    check_ranks([0, 32], 32)
