"""Units over slots that another process writes: every change is noticed, before or after, by whatever computes."""

from __future__ import annotations

import platform
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from slotcar_kernels import cpu, eager, native
from slotcar_kernels.guard import (
    Change,
    Changed,
    Guard,
    GuardedBatch,
    GuardedForward,
    Watch,
    Words,
    WriterWords,
    why_not,
)
from slotcar_kernels.plan import Plan, Segment, plan_rows
from slotcar_kernels.sites import SiteSlots

from tests.kernels.cases import Entries, site_slots
from tests.tolerances import assert_same_bits

EPOCH, OTHER_EPOCH = b"0123456789abcdef", b"0123456789abcdeX"
GENERATION = 7
ARM = "aarch64-linux-gnu-g++"
GUARD = Path(native.__file__).with_name("native") / "guard.cpp"


@dataclass
class Writer:
    """The other side: `memory` has the epoch (words 0 and 1), both closed words and the words of four slots."""

    memory: Words = field(default_factory=lambda: np.zeros(8, np.uint64))

    def __post_init__(self) -> None:
        self.memory[:2] = np.frombuffer(EPOCH, np.uint64)
        self.link, self.ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = WriterWords(self.memory[:2], self.memory[2:3], self.memory[3:4], self.memory[4:])
        self.watch = Watch(words, EPOCH, self.ours.fileno())

    def guard(self, *slots: int) -> Guard:
        return Guard(self.watch, slots, GENERATION)

    def close(self) -> None:
        self.link.close()
        self.ours.close()


Changes = dict[str, tuple[Change, Callable[[Writer], object]]]
WORDS: Changes = {
    "slot": (Change.STALE_AFTER, lambda writer: writer.memory.__setitem__(6, GENERATION + 1)),
    "slot, by far": (Change.STALE_AFTER, lambda writer: writer.memory.__setitem__(6, (1 << 64) - 1)),
    "closed": (Change.CLOSED, lambda writer: writer.memory.__setitem__(2, 1)),
    "epoch": (Change.OTHER_EPOCH, lambda writer: writer.memory.__setitem__(1, 1)),
    "connection ended": (Change.DISCONNECTED, lambda writer: writer.memory.__setitem__(3, 1)),
}
ENDS: Changes = {
    "killed": (Change.GONE, lambda writer: writer.link.close()),
    "shut": (Change.GONE, lambda writer: writer.link.shutdown(socket.SHUT_WR)),
    "something was sent": (Change.GONE, lambda writer: writer.link.send(b"?")),
    "closed by this side": (Change.GONE, lambda writer: writer.watch.close()),
    "closed underneath": (Change.GONE, lambda writer: writer.ours.close()),
}
CHANGES = WORDS | ENDS


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.close()


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """With the library, and as if there were none."""
    if request.param == "compiled":
        if native.library() is None:
            pytest.skip(native.backend())
        yield request.param
        return
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "_native.so")
    native._loaded.cache_clear()
    if why_not():
        pytest.skip(why_not())
    yield request.param
    native._loaded.cache_clear()


def refused(call: Callable[[], object]) -> Change:
    with pytest.raises(Changed) as caught:
        call()
    return caught.value.change


def test_nothing_changed(way: str, writer: Writer) -> None:
    writer.memory[4:] = GENERATION, 1, 0, GENERATION
    guard = writer.guard(0, 1, 2, 3)
    for _ in range(3):
        guard.begin(5)
        guard.end()


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed_after(way: str, writer: Writer, name: str) -> None:
    change, make = CHANGES[name]
    guard = writer.guard(0, 2)
    guard.begin(1)
    make(writer)
    for _ in range(2):
        assert refused(guard.end) is change


@pytest.mark.parametrize("name", WORDS)
def test_what_a_word_says_is_noticed_before(way: str, writer: Writer, name: str) -> None:
    change, make = WORDS[name]
    guard = writer.guard(0, 2)
    make(writer)
    before = Change.STALE_BEFORE if change is Change.STALE_AFTER else change
    assert refused(lambda: guard.begin(1)) is before


def test_another_slot_may_change(way: str, writer: Writer) -> None:
    guard = writer.guard(0, 2)
    writer.memory[4 + 1] = writer.memory[4 + 3] = GENERATION + 1
    guard.begin(1)
    guard.end()


def test_a_signal_is_no_change(way: str, writer: Writer) -> None:
    guard, before = writer.guard(0), signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        for _ in range(2000):
            guard.begin(1)
            guard.end()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_units_are_counted_where_the_writer_sees_them(way: str, writer: Writer) -> None:
    guard, first, second = writer.guard(0), np.full(3, 9, np.uint64), np.full(4, 9, np.uint64)
    guard.begin(3)
    guard.use = first
    assert first.tolist() == [GENERATION, 0, 0]
    guard.begin(3)
    guard.begin(4)
    guard.use = second
    guard.begin(1)
    writer.memory[4] = GENERATION + 1
    assert refused(lambda: guard.begin(1)) is Change.STALE_BEFORE
    assert (first.tolist(), second.tolist()) == ([GENERATION, 2, 7], [GENERATION, 1, 1, 9])
    guard.use = None
    assert guard.use is None
    assert refused(lambda: guard.begin(1)) is Change.STALE_BEFORE


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_without_a_word_is_refused(way: str, writer: Writer, slot: int) -> None:
    with pytest.raises(ValueError, match=f"slots .*{slot}.* below 4"):
        writer.guard(0, slot)


def test_another_processor_needs_the_library(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "_native.so")
    request.addfinalizer(native._loaded.cache_clear)
    native._loaded.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64 does not keep loads in order" in why_not()
    with pytest.raises(ValueError, match="aarch64"):
        writer.guard(0)


ENTRIES: Entries = [(1, 2), (None, 1), (0, 3), (1, 1)]
WIDTHS = (40, 16)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[SiteSlots], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sites = [site_slots(24, width, dtype, seed=width) for width in WIDTHS]
    x = torch.randn(7, 24, generator=generator).to(dtype)
    return x, sites, [torch.randn(7, width, generator=generator).to(dtype) for width in WIDTHS]


def batch_of(guard: Guard, plan: Plan, sites: list[SiteSlots]) -> GuardedBatch:
    slots = [segment.slot for segment in plan.segments]
    ranks = np.array([[site.ranks[slot] for slot in slots] for site in sites], np.int64)
    return GuardedBatch(guard, plan, ranks, np.array([[site.scales[slot] for slot in slots] for site in sites]))


def forward_at(sites: list[SiteSlots], dtype: torch.dtype = torch.float32, name: str | None = None) -> GuardedForward:
    return GuardedForward(dtype, {index: (site.a, site.b) for index, site in enumerate(sites)}, cpu.Kernel(name))


def plainly(
    plan: Plan, x: torch.Tensor, sites: list[SiteSlots], bases: list[torch.Tensor] | None
) -> list[torch.Tensor]:
    outs = [torch.empty(len(x), site.out_features, dtype=x.dtype) for site in sites]
    cpu.lora_forward(plan, x, sites, outs, bases)
    return outs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_a_unit_has_the_bits_of_the_kernel(way: str, writer: Writer, dtype: torch.dtype, add: bool) -> None:
    """Whatever it computed before, and at any of the batch's sites."""
    x, sites, bases = inputs(dtype)
    plans = [plan_rows(ENTRIES), plan_rows([(3, 7)]), plan_rows([(None, 7)]), plan_rows(ENTRIES)]
    batches = [batch_of(writer.guard(0, 1, 3), plan, sites) for plan in plans]
    both, last = forward_at(sites, dtype), GuardedForward(dtype, {1: (sites[1].a, sites[1].b)})
    for plan, batch in [*zip(plans, batches, strict=True)] * 2:
        wanted = plainly(plan, x, sites, bases if add else None)
        found = both(batch, x.clone(), bases if add else None) + last(batch, x, bases[1:] if add else None)
        for output, want in zip(found, [*wanted, wanted[1]], strict=True):
            assert_same_bits(output, want)


def test_each_unit_reads_its_own_tensors_and_keeps_none(way: str, writer: Writer) -> None:
    x, sites, bases = inputs()
    batch, forward = batch_of(writer.guard(0, 1), plan_rows(ENTRIES), sites), forward_at(sites)
    wide = torch.zeros(7, 48)
    wide[:, :24] = x
    plain, added, again = forward(batch, x), forward(batch, wide[:, :24], bases), forward(batch, torch.zeros(7, 24))
    for delta, total, nothing, base in zip(plain, added, again, bases, strict=True):
        torch.testing.assert_close(total, base + delta)
        assert not nothing.any()
        assert delta.any()


def test_what_does_not_fit_is_refused(way: str, writer: Writer) -> None:
    x, sites, bases = inputs()
    guard, plan = writer.guard(0, 1), plan_rows(ENTRIES)
    batch, forward = batch_of(guard, plan, sites), forward_at(sites)
    for bad_x, bad_bases, message in (
        (x[:6], None, "x is"),
        (x.double(), None, "x is"),
        (x.to("meta"), None, "on meta"),
        (torch.zeros(24, 7).t(), None, "x has strides"),
        (x, bases[::-1], "base is"),
        (x, bases[:1], "shorter"),
    ):
        with pytest.raises(ValueError, match=message):
            forward(batch, bad_x, bad_bases)
    with pytest.raises(ValueError, match="wanted one input"):
        forward_at([*sites, site_slots(25, 40)])
    with pytest.raises(ValueError, match="as many slots and ranks"):
        forward_at([*sites, site_slots(24, 40, ranks=(3,))])
    with pytest.raises(ValueError, match="wanted 2 segments"):
        GuardedBatch(guard, plan, np.ones((2, 3)), np.ones((2, 3)))
    for slot, rank in ((0, 33), (9, 1)):
        odd = GuardedBatch(guard, plan_rows([(slot, 7)]), np.full((2, 1), rank), np.ones((2, 1)))
        with pytest.raises(ValueError, match="of 9 slots, wanted them up to 32"):
            forward(odd, x)


def test_a_plan_of_rows_that_are_not_there_is_no_change(writer: Writer) -> None:
    x, sites, _ = inputs()
    batch = batch_of(writer.guard(0), Plan(7, (Segment(0, 0, 8),), ()), sites)
    with pytest.raises(ValueError, match="out of range"):
        forward_at(sites)(batch, x)


@pytest.mark.parametrize("name", WORDS)
def test_a_unit_that_is_refused_before_is_not_computed(
    way: str, writer: Writer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, sites, _ = inputs()
    batch, forward = batch_of(writer.guard(0, 2), plan_rows([(0, 7)]), sites), forward_at(sites)
    made = [torch.zeros(7, width) for width in WIDTHS]
    monkeypatch.setattr(forward, "_outs", lambda rows: made)
    WORDS[name][1](writer)
    refused(lambda: forward(batch, x))
    assert not any(out.any() for out in made)


@pytest.mark.parametrize("name", ENDS)
def test_a_unit_without_a_writer_returns_nothing(way: str, writer: Writer, name: str) -> None:
    x, sites, _ = inputs()
    batch, forward = batch_of(writer.guard(0, 2), plan_rows([(0, 7)]), sites), forward_at(sites)
    ENDS[name][1](writer)
    assert refused(lambda: forward(batch, x)) is Change.GONE


@pytest.mark.parametrize(
    ("word", "change"),
    [(6, Change.STALE_AFTER), (2, Change.CLOSED), (0, Change.OTHER_EPOCH), (3, Change.DISCONNECTED)],
    ids=str,
)
def test_what_changes_during_the_kernel_is_noticed(
    writer: Writer, word: int, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself writes the word: its output lies there."""
    if native.library() is None:
        pytest.skip(native.backend())
    site = SiteSlots(torch.ones(1, 1, 4), torch.ones(1, 1, 2), [1], [1.0])
    batch, forward = batch_of(writer.guard(0, 2), plan_rows([(0, 1)]), [site]), forward_at([site])
    out = torch.from_numpy(writer.memory[word : word + 1].view(np.float32))[None]
    monkeypatch.setattr(forward, "_outs", lambda rows: [out])
    assert refused(lambda: forward(batch, torch.ones(1, 4))) is change
    assert out.tolist() == [[4.0, 4.0]]


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_during_torch_is_noticed(writer: Writer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, make = CHANGES[name]
    x, sites, _ = inputs()
    compute = eager.lora_forward
    batch = batch_of(writer.guard(0, 2), plan_rows([(0, 7)]), sites)

    def compute_and_change(*arguments: object) -> None:
        compute(*arguments)  # type: ignore[arg-type]
        make(writer)

    monkeypatch.setattr(eager, "lora_forward", compute_and_change)
    assert refused(lambda: forward_at(sites, name="torch")(batch, x)) is change


def test_the_second_check_waits_for_the_loads_before_it() -> None:
    """On aarch64 nothing else than this barrier keeps the words from being loaded before the weights."""
    if shutil.which(ARM) is None:
        pytest.skip(f"there is no {ARM}: run make apt-full")
    command = [ARM, "-std=c++17", "-O3", "-ffp-contract=off", "-S", "-o", "-", str(GUARD)]
    assembly = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    end = assembly.split("slotcar_guard_end:")[1].split(".size\tslotcar_guard_end")[0]
    before, barrier, _ = end.partition("dmb\tishld")
    assert barrier, end
    assert not re.search(r"^\tld", before, re.MULTILINE), before
    assert "ldar" in assembly
