"""A slot's arrays have the bits that torch gives them, whatever the shapes and types; nothing else is written."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence

import pytest
import torch
from slotcar_kernels.cpu import Kernel
from slotcar_kernels.fill import SlotArray, fill_slot

from tests.tolerances import assert_same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = list(itertools.product(DTYPES, DTYPES))
# Whole tiles of 64 columns and 8 ranks, parts of them, and rows that begin at no cache line.
SHAPES = [(16, 4096), (8, 64), (96, 192), (1, 1), (1, 100), (5, 1), (3, 7), (12, 65), (17, 1030), (33, 63), (64, 127)]


def values_of(rank: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    """Of every size that fits all types, ties between neighbours and subnormals among them."""
    generator = torch.Generator().manual_seed(rank * features)
    exponents = torch.randint(-26, 15, (rank, features), generator=generator)
    mantissas = torch.randint(0, 1 << 13, (rank, features), generator=generator) / (1 << 12)
    return (torch.randn(rank, features, generator=generator).sign() * mantissas * 2.0**exponents).to(dtype)


def slot_array(padded: int, features: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Rows of NaN inside a larger array of NaN, `offset` elements behind the start of a cache line."""
    memory = torch.full(((padded + 2) * features + 64,), math.nan, dtype=dtype)
    skipped = -(memory.data_ptr() // dtype.itemsize) % (64 // dtype.itemsize)
    return memory[skipped + offset :][: padded * features].view(padded, features)


def filled(arrays: Sequence[SlotArray], kernel: Kernel) -> list[torch.Tensor]:
    fill_slot(arrays, kernel.name)
    return [rows for rows, _ in arrays]


@pytest.mark.parametrize(("file_dtype", "slot_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bits_are_those_of_torch(
    compiled: Kernel, file_dtype: torch.dtype, slot_dtype: torch.dtype, transposed: bool
) -> None:
    for (rank, features), offset in itertools.product(SHAPES, (0, 1)):
        values = values_of(rank, features, file_dtype)
        if transposed:
            values = values.t().contiguous().t()
        rows = slot_array(rank + 3, features, slot_dtype, offset)
        found, wanted = rows, torch.zeros(rank + 3, features, dtype=slot_dtype)
        fill_slot([SlotArray(rows, values)], compiled.name)
        wanted[:rank].copy_(values)
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("slot_dtype", DTYPES[1:], ids=str)
def test_every_kind_of_finite_number_is_rounded_as_torch_rounds(compiled: Kernel, slot_dtype: torch.dtype) -> None:
    """The upper half of a float counts up, the lower is where roundings meet; Inf and NaN no adapter has."""
    upper = torch.arange(0, 1 << 16).to(torch.int32)
    lower = torch.tensor([0x0000, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    numbers = ((upper[:, None] << 16) | lower.to(torch.int32)).view(torch.float32)
    numbers = torch.where(numbers.isfinite(), numbers, 0.0)
    for values in (numbers, numbers.t()):
        rows = slot_array(*values.shape, slot_dtype)
        fill_slot([SlotArray(rows, values)], compiled.name)
        assert_same_bits(rows, values.to(slot_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_equal_type_is_copied_bit_for_bit(compiled: Kernel, dtype: torch.dtype) -> None:
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    values = torch.arange(0, 1 << 16).to(torch.int32).to(bits).view(dtype).reshape(256, 256)
    for source in (values, values.t()):
        rows = slot_array(256, 256, dtype)
        fill_slot([SlotArray(rows, source)], compiled.name)
        assert torch.equal(rows.view(bits), source.contiguous().view(bits))


def test_several_arrays_of_several_types_in_one_call(kernel: Kernel) -> None:
    arrays = [
        SlotArray(slot_array(16, 40, torch.bfloat16), values_of(5, 40, torch.float32)),
        SlotArray(slot_array(16, 72, torch.bfloat16), values_of(72, 5, torch.float16).t()),
        SlotArray(slot_array(16, 72, torch.bfloat16), None),
        SlotArray(slot_array(0, 8, torch.bfloat16), None),
    ]
    a, b, none, empty = filled(arrays, kernel)
    assert_same_bits(a[:5], arrays[0].values.to(torch.bfloat16))
    assert_same_bits(b[:5], arrays[1].values.to(torch.bfloat16))
    assert not a[5:].any()
    assert not b[5:].any()
    assert not none.any()
    assert empty.shape == (0, 8)
    assert filled([], kernel) == []


@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_beside_the_rows_is_written(kernel: Kernel, transposed: bool) -> None:
    memory = torch.full((40 * 100,), math.nan)
    rows = memory[500:1700].view(12, 100)
    values = values_of(100, 9, torch.float32).t() if transposed else values_of(9, 100, torch.float32)
    fill_slot([SlotArray(rows, values)], kernel.name)
    assert memory[:500].isnan().all()
    assert memory[1700:].isnan().all()
    assert not rows.isnan().any()


def test_strides_that_the_library_can_not_follow_go_to_torch(compiled: Kernel) -> None:
    values = values_of(20, 30, torch.float32)[::2, ::3]
    rows = slot_array(16, 10, torch.float32)
    fill_slot([SlotArray(rows, values)], compiled.name)
    assert_same_bits(rows[:10], values.contiguous())


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        (torch.zeros(4, 10), torch.ones(5, 10)),
        (torch.zeros(4, 10), torch.ones(4, 9)),
        (torch.zeros(4, 10), torch.ones(10)),
        (torch.zeros(4, 20)[:, ::2], torch.ones(4, 10)),
        (torch.zeros(40), torch.ones(4, 10)),
        (torch.zeros(4, 10, dtype=torch.float16), torch.ones(4, 10)),
        (torch.zeros(4, 10, device="meta"), torch.ones(4, 10)),
    ],
)
def test_what_does_not_fit_is_refused_before_a_write(kernel: Kernel, rows: torch.Tensor, values: torch.Tensor) -> None:
    good = torch.zeros(4, 10)
    with pytest.raises(ValueError, match=r"rows|values"):
        fill_slot([SlotArray(good, torch.ones(4, 10)), SlotArray(rows, values)], kernel.name)
    assert not good.any()


def test_a_kernel_that_is_not_there_is_refused(compiled: Kernel) -> None:
    with pytest.raises(ValueError, match="sse9"):
        fill_slot([SlotArray(torch.zeros(4, 10), torch.ones(4, 10))], "sse9")


def test_python_runs_beside_a_fill(compiled: Kernel) -> None:
    """Counts the turns of another thread from the fill's start to its end: if it held the GIL, there were none."""
    values = values_of(64, 1 << 16, torch.float32)
    rows = torch.empty(64, 1 << 16)
    done, turns, turns_in_fill = threading.Event(), 0, 0

    def fill() -> None:
        nonlocal turns_in_fill
        before = turns
        fill_slot([SlotArray(rows, values)] * 20, compiled.name)
        turns_in_fill = turns - before
        done.set()

    thread = threading.Thread(target=fill)
    thread.start()
    while not done.is_set():
        turns += 1
    thread.join()
    assert turns_in_fill > 0
