"""The compiled kernels: every width and rank, bits that depend on the row alone, and nothing read that is not there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slotcar_kernels import cpu, native
from slotcar_kernels.cpu import Kernel, lora_forward
from slotcar_kernels.plan import Plan, Segment, plan_rows
from slotcar_kernels.reference import lora_rows
from slotcar_kernels.sites import SiteSlots

from tests.kernels.cases import Entries, rows_of, site_slots
from tests.tolerances import assert_close, assert_same_bits

LIBRARY = native._LIBRARY
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RANKS = (0, 1, 7, 8, 16, 17, 64)
ENTRIES = st.lists(
    st.tuples(st.none() | st.integers(0, len(RANKS) - 1), st.sampled_from([1, 1, 2, 3, 5, 70])), min_size=1, max_size=8
)
ANY_KERNEL = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def randn(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compute(
    kernel: Kernel, entries: Entries, x: torch.Tensor, site: SiteSlots, base: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.full((x.shape[0], site.out_features), math.nan, dtype=x.dtype)
    lora_forward(plan_rows(entries), x, [site], [out], [base], kernel)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11])
def test_every_rank_and_number_of_rows(
    compiled: Kernel, rows: int, slot_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    site = site_slots(67, 45, slot_dtype, ranks=RANKS)
    entries: Entries = [(slot, rows) for slot in range(len(RANKS))]
    x, base = randn(rows_of(entries), 67, dtype), randn(rows_of(entries), 45, dtype, seed=1)
    assert_close(compute(compiled, entries, x, site), lora_rows(entries, x, site))
    assert_close(compute(compiled, entries, x, site, base), lora_rows(entries, x, site, base))


@pytest.mark.parametrize("slot_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(1, 1), (31, 4097), (4100, 33), (1024, 2048), (5125, 5125)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_features_beyond_chunks_and_panels(
    compiled: Kernel, rows: int, widths: tuple[int, int], slot_dtype: torch.dtype
) -> None:
    site = site_slots(*widths, slot_dtype, ranks=(17, 9))
    entries: Entries = [(0, rows), (None, 1), (1, 1)]
    x, base = randn(rows + 2, widths[0], slot_dtype), randn(rows + 2, widths[1], slot_dtype, seed=1)
    assert_close(compute(compiled, entries, x, site, base), lora_rows(entries, x, site, base))


@pytest.mark.parametrize("rows", [1, 40, 130])
def test_a_rank_so_high_that_fewer_rows_fit_a_block(compiled: Kernel, rows: int) -> None:
    site = site_slots(40, 24, ranks=(700, 3))
    entries: Entries = [(0, rows), (1, 2)]
    x = randn(rows + 2, 40, torch.float32)
    assert_close(compute(compiled, entries, x, site), lora_rows(entries, x, site))


@ANY_KERNEL
@given(
    entries=ENTRIES,
    widths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    add=st.booleans(),
    threads=st.integers(1, 4),
)
def test_any_batch(
    compiled: Kernel,
    entries: Entries,
    widths: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    add: bool,
    threads: int,
) -> None:
    site = site_slots(*widths, dtypes[0], ranks=RANKS)
    x = randn(rows_of(entries), widths[0], dtypes[1])
    base = randn(len(x), widths[1], dtypes[1], seed=1) if add else None
    found = compute(Kernel(compiled.name, threads), entries, x, site, base)
    assert_close(found, lora_rows(entries, x, site, base))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ANY_KERNEL
@given(entries=ENTRIES)
def test_a_row_has_the_same_bits_alone(compiled: Kernel, dtype: torch.dtype, entries: Entries) -> None:
    site = site_slots(2100, 1300, dtype, ranks=RANKS)
    x, base = randn(rows_of(entries), 2100, dtype), randn(rows_of(entries), 1300, dtype, seed=1)
    found = compute(compiled, entries, x, site, base)
    slots = [slot for slot, count in entries for _ in range(count)]
    for row in {0, len(slots) // 2, len(slots) - 1}:
        alone = compute(compiled, [(slots[row], 1)], x[row : row + 1], site, base[row : row + 1])
        assert_same_bits(found[row : row + 1], alone)


@pytest.mark.parametrize("threads", [2, 3, 7, 64])
def test_threads_do_not_change_bits(compiled: Kernel, threads: int) -> None:
    entries: Entries = [(6, 200), (None, 3), (2, 1), (5, 66), (6, 2), (0, 4)]
    sites = [site_slots(130, width, torch.bfloat16, ranks=RANKS) for width in (96, 40)]
    x = randn(rows_of(entries), 130, torch.bfloat16)
    outs = {count: [torch.full((len(x), site.out_features), math.nan, dtype=x.dtype) for site in sites]
            for count in (1, threads)}  # fmt: skip
    for count, out in outs.items():
        lora_forward(plan_rows(entries), x, sites, out, None, Kernel(compiled.name, count))
    for one, several in zip(outs[1], outs[threads], strict=True):
        assert_same_bits(several, one)


@pytest.mark.parametrize("rows", [1, 5, 9, 130])
def test_one_segment_on_several_threads_has_the_same_bits(compiled: Kernel, rows: int) -> None:
    """Its rows are shared out, in whole tiles."""
    site = site_slots(1100, 600, torch.bfloat16, ranks=RANKS)
    x, base = randn(rows, 1100, torch.bfloat16), randn(rows, 600, torch.bfloat16, seed=1)
    one, *others = (compute(Kernel(compiled.name, threads), [(6, rows)], x, site, base) for threads in (1, 2, 3, 64))
    for several in others:
        assert_same_bits(several, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_sets_agree(compiled: Kernel, dtype: torch.dtype) -> None:
    entries: Entries = [(slot, 3) for slot in range(len(RANKS))]
    site = site_slots(1100, 300, dtype, ranks=RANKS)
    x = randn(rows_of(entries), 1100, dtype)
    found, wanted = (compute(kernel, entries, x, site) for kernel in (compiled, Kernel("portable")))
    step = {4: 1e-5, 2: torch.finfo(dtype).eps}[dtype.itemsize]
    torch.testing.assert_close(found, wanted, rtol=step, atol=1e-5)


def all_bits(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).reshape(256, 256)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_16_bit_number_is_read_and_written(compiled: Kernel, dtype: torch.dtype) -> None:
    base = all_bits(dtype)
    site = SiteSlots(torch.zeros(1, 1, 8), torch.zeros(1, 1, 256), [1], [1.0])
    found = compute(compiled, [(0, 256)], torch.zeros(256, 8, dtype=dtype), site, base)
    torch.testing.assert_close(found, base, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("slot_dtype", DTYPES, ids=str)
def test_a_sum_is_rounded_as_torch_rounds(compiled: Kernel, slot_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Rank 1 with x = A = 1: the sum is B itself, every kind of number and ties between neighbours among them."""
    if slot_dtype == torch.float32:
        ends = torch.tensor([0x0000, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x7FFF, 0x8000, 0x8001], dtype=torch.int32)
        values = (torch.arange(0, 1 << 15).to(torch.int32)[:, None] * (1 << 16) + ends).view(torch.float32).flatten()
    else:
        values = all_bits(slot_dtype).flatten()
    a = torch.zeros(1, 1, 8)
    a[0, 0, 0] = 1
    site = SiteSlots(a.to(slot_dtype), values.reshape(1, 1, -1), [1], [1.0])
    found = compute(compiled, [(0, 1)], torch.ones(1, 8, dtype=dtype), site)[0]
    torch.testing.assert_close(found, values.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_pass_as_in_torch(compiled: Kernel, dtype: torch.dtype) -> None:
    site = site_slots(70, 50, dtype, ranks=RANKS)
    entries: Entries = [(slot, 3) for slot in range(len(RANKS))]
    x, base = randn(21, 70, dtype), randn(21, 50, dtype, seed=1)
    x[0::3, 3], x[1::3, 69], base[2::3, 49], base[4, 2] = math.inf, math.nan, -math.inf, math.nan
    site.b[4, 1, 7] = math.inf
    found, wanted = (compute(kernel, entries, x, site, base) for kernel in (compiled, Kernel("torch")))
    step = {4: 1e-5, 2: torch.finfo(dtype).eps}[dtype.itemsize]
    torch.testing.assert_close(found, wanted, rtol=step, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, (Segment(0, 0, 3),), ()),
        Plan(2, (Segment(0, -1, 2),), ()),
        Plan(2, (Segment(0, 2, 1),), ()),
        Plan(2, (), ((0, 3),)),
        Plan(2, (Segment(0, 0, 2),), (), torch.tensor([0, 2]), torch.tensor([0, 1])),
        Plan(2, (Segment(0, 0, 2),), (), torch.tensor([-1, 0]), torch.tensor([0, 1])),
        Plan(2, (Segment(0, 0, 2),), (), torch.tensor([0]), torch.tensor([0, 1])),
        Plan(2, (Segment(0, 0, 2),), (), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1])),
    ],
    ids=lambda plan: str((plan.segments, plan.base_ranges)),
)
def test_a_plan_of_rows_that_are_not_there_is_refused(compiled: Kernel, plan: Plan) -> None:
    out = torch.zeros(2, 96)
    with pytest.raises(ValueError, match="wanted"):
        lora_forward(plan, torch.randn(2, 64), [site_slots(64, 96)], [out], None, compiled)
    assert not out.any()


def test_strides_that_the_library_can_not_follow_are_refused(compiled: Kernel) -> None:
    site, plan = site_slots(64, 96), plan_rows([(0, 3)])
    x, out = torch.randn(3, 64), torch.zeros(3, 96)
    refused = [
        (torch.randn(64, 3).t(), out, None, "x has strides"),
        (x, torch.zeros(96, 3).t(), None, "out has strides"),
        (x, torch.zeros(1, 96).expand(3, 96), None, "over each other"),
        (x, torch.zeros(200).as_strided((3, 96), (50, 1)), None, "over each other"),
        (x, out, torch.zeros(96, 3).t(), "base has strides"),
        (x.to("meta"), out, None, "on meta"),
    ]
    for bad_x, bad_out, base, message in refused:
        with pytest.raises(ValueError, match=message):
            lora_forward(plan, bad_x, [site], [bad_out], [base], compiled)


def test_slots_that_are_not_there_are_refused(compiled: Kernel) -> None:
    whole, x, out = site_slots(64, 96), torch.randn(3, 64), torch.zeros(3, 96)
    refused = [
        SiteSlots(whole.a[:2], whole.b[:2], whole.ranks, whole.scales),
        SiteSlots(whole.a, whole.b, whole.ranks, whole.scales[:2]),
        SiteSlots(whole.a, whole.b, whole.ranks[:2], whole.scales),
        SiteSlots(whole.a, whole.b[:, :16], whole.ranks, whole.scales),
        SiteSlots(whole.a, whole.b.half(), whole.ranks, whole.scales),
        SiteSlots(whole.a.double(), whole.b.double(), whole.ranks, whole.scales),
        SiteSlots(whole.a[:, :, None], whole.b, whole.ranks, whole.scales),
    ]
    for site in refused:
        with pytest.raises(ValueError, match=r"no slot 2|wanted"):
            lora_forward(plan_rows([(0, 1), (2, 2)]), x, [site], [out], None, compiled)
    assert not out.any()


def test_slots_that_only_torch_can_read_go_to_torch(compiled: Kernel) -> None:
    site = site_slots(64, 96)
    odd = SiteSlots(site.a.transpose(1, 2).contiguous().transpose(1, 2), site.b, site.ranks, site.scales)
    entries: Entries = [(0, 2), (3, 1)]
    x = randn(3, 64, torch.float32)
    assert_close(compute(Kernel(), entries, x, odd), lora_rows(entries, x, site))
    with pytest.raises(ValueError, match="no kernel"):
        compute(compiled, entries, x, odd)
    assert native.takes(site)
    assert not native.takes(SiteSlots(torch.empty(1, 16385, 1), torch.empty(1, 16385, 1), [1], [1.0]))


def test_a_kernel_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel 'sse9'"):
        compute(Kernel("sse9"), [(0, 2)], torch.randn(2, 64), site_slots(64, 96))


@pytest.fixture
def another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the library is looked for; nothing is there yet."""
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "_native.so")
    native._loaded.cache_clear()
    yield tmp_path / "_native.so"
    native._loaded.cache_clear()


def test_without_a_library_torch_computes_and_says_so(another_library: Path) -> None:
    assert not native.available()
    assert native.backend().startswith("torch: this installation has no compiled kernel")
    entries: Entries = [(0, 2)]
    x, site = torch.randn(2, 64), site_slots(64, 96)
    assert_same_bits(compute(Kernel(), entries, x, site), compute(Kernel("torch"), entries, x, site))
    with pytest.raises(ValueError, match="no kernel 'portable'"):
        compute(Kernel("portable"), entries, x, site)


def test_a_file_that_is_no_library_is_not_used(another_library: Path) -> None:
    another_library.write_bytes(b"not a library")
    assert native.backend().startswith("torch: the compiled kernel does not load: ")


def test_a_library_of_another_version_is_not_used(
    compiled: Kernel, monkeypatch: pytest.MonkeyPatch, another_library: Path
) -> None:
    another_library.write_bytes(LIBRARY.read_bytes())
    monkeypatch.setattr(native, "_ABI_VERSION", 0)
    assert native.backend() == "torch: the compiled kernel has version 3, wanted 0: build it again"


def test_the_best_kernel_is_the_default(compiled: Kernel) -> None:
    assert native.backend() == native.best_isa()
    assert cpu.isa_for(Kernel(), [site_slots(8, 8)]) == native.best_isa()


def test_the_library_is_as_new_as_its_sources(compiled: Kernel) -> None:
    sources = Path(native.__file__).with_name("native").iterdir()
    assert LIBRARY.stat().st_mtime >= max(path.stat().st_mtime for path in sources), "run make native"
