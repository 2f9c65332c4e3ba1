"""What is the GPU device's own: loads beside Forwards, long batches, graphs that sites share, and a GPU that is lost.

That it computes what the CPU's device does is for the suite of both, in tests/unit/device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from slotcar_kernels.buffers import DTYPES
from slotcar_kernels.triton.tiles import BUCKETS, MOST_ROWS
from slotcar_sidecar.core.errors import CapacityExceeded, DeviceLost, RequestInvalid
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.device.cuda.device import CudaDevice
from slotcar_sidecar.device.cuda.lane import Lane
from slotcar_sidecar.device.cuda.machine import Gpu
from slotcar_sidecar.device.cuda.slots import DeviceSlots

from tests.fakes.machine import HostMachine
from tests.fakes.weights import fake_weights
from tests.gpu.place import DEVICE
from tests.tolerances import assert_same_bits
from tests.unit.device.kinds import to_matrix, to_tensor

pytestmark = pytest.mark.gpu

ON_GPU = DEVICE.type == "cuda"
A, B, C = SlotId(0), SlotId(1), SlotId(2)
MODEL = ModelSpec.of([Site("k", 32, 24), Site("q", 32, 40), Site("v", 32, 24)])
FIRST, SECOND = (fake_weights(MODEL, {"k": 3, "q": 17, "v": 5}, seed=seed) for seed in (1, 2))


def machine() -> Gpu | HostMachine:
    return Gpu() if ON_GPU else HostMachine()


def device(of: Gpu | HostMachine | None = None, model: ModelSpec = MODEL) -> CudaDevice:
    made = CudaDevice(of or machine(), 3, 32, poison=True)
    made.shape(model)
    return made


def forward(target: CudaDevice, slots: list[SlotId | None], *sites: str, dtype: str = "float32") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 32, generator=generator)[: len(slots)].to(DTYPES[dtype])
    batch = target.prepare([(slot, 1) for slot in slots], [ForwardItem(site, to_matrix(x)) for site in sites])
    return [to_tensor(found).clone() for found in target.execute(batch)]


@contextmanager
def a_fill_that_waits(target: CudaDevice, of: HostMachine, slot: SlotId) -> Iterator[None]:
    """A fill is under way in a thread, whose copies are not complete."""
    started, may_end, filler = threading.Event(), threading.Event(), None

    def pause(_stream: int) -> None:
        if threading.current_thread() is filler:
            started.set()
            assert may_end.wait(30)

    of.pauses.append(pause)
    filler = threading.Thread(target=target.fill, args=(slot, SECOND))
    filler.start()
    assert started.wait(30)
    yield
    may_end.set()
    filler.join()


@pytest.mark.skipif(ON_GPU, reason="a GPU's copies do not wait for a test")
def test_no_forward_waits_for_a_load() -> None:
    """Forwards are computed to their end while a fill's copies are not complete."""
    of = HostMachine()
    target = device(of)
    target.fill(A, FIRST)
    wanted = forward(target, [A, None, A], "q")
    with a_fill_that_waits(target, of, B):
        for _ in range(3):
            assert_same_bits(forward(target, [A, None, A], "q")[0], wanted[0])
    assert target.matches(B, SECOND)


@pytest.mark.skipif(not ON_GPU, reason="needs copies that take a while")
def test_forwards_end_while_copies_to_a_slot_are_under_way() -> None:
    """Counted by events: those that were complete while the event behind copies as large as a leaf's was not."""
    of = Gpu()
    target = device(of)
    target.fill(A, FIRST)
    forward(target, [A, None, A], "q")
    stream, here = of.stream(), of.pinned((1 << 22,), torch.uint8)
    there = torch.empty(1 << 22, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    with stream.current():
        for _ in range(4000):
            there.copy_(here, non_blocking=True)
    behind, count = stream.event(), 0
    while not behind.is_done() and count < 5:
        forward(target, [A, None, A], "q")
        count += 1
    still_copying = not behind.is_done()
    behind.wait()
    assert (count, still_copying) == (5, True)


def test_what_is_filled_side_by_side_is_whole() -> None:
    target = device()
    threads = [threading.Thread(target=target.fill, args=pair) for pair in ((A, FIRST), (B, SECOND), (C, FIRST))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for slot, weights in ((A, FIRST), (B, SECOND), (C, FIRST)):
        assert target.matches(slot, weights)


@pytest.mark.skipif(ON_GPU, reason="a GPU's kernels do not wait for a test")
def test_a_forward_beside_another_has_a_lane_of_its_own() -> None:
    of, started, may_end = HostMachine(), threading.Event(), threading.Event()
    target = device(of)
    target.fill(A, FIRST)
    target.fill(B, SECOND)
    wanted = {slot: forward(target, [slot, None], "q")[0] for slot in (A, B)}
    found: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: found.extend(forward(target, [A, None], "q")))

    def pause(_stream: int) -> None:
        if threading.current_thread() is other:
            started.set()
            assert may_end.wait(30)

    of.pauses.append(pause)
    other.start()
    assert started.wait(30)
    assert_same_bits(forward(target, [B, None], "q")[0], wanted[B])
    may_end.set()
    other.join()
    assert_same_bits(found[0], wanted[A])
    assert len(target._lanes) == 2


@pytest.mark.skipif(not ON_GPU, reason="Triton's interpreter is one thread's")
def test_forwards_of_several_threads_have_lanes_of_their_own() -> None:
    target = device()
    target.fill(A, FIRST)
    target.fill(B, SECOND)
    wanted = {slot: forward(target, [slot, None], "q")[0] for slot in (A, B)}
    found: dict[SlotId, list[torch.Tensor]] = {A: [], B: []}

    def compute(slot: SlotId) -> None:
        found[slot] += [forward(target, [slot, None], "q")[0] for _ in range(5)]

    threads = [threading.Thread(target=compute, args=(slot,)) for slot in (A, B)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for slot, outs in found.items():
        assert len(outs) == 5
        for out in outs:
            assert_same_bits(out, wanted[slot])
    assert 1 <= len(target._lanes) <= 2


def test_a_batch_longer_than_the_longest_bucket_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    target = device()
    target.fill(A, FIRST)
    target.fill(C, SECOND)
    slots: list[SlotId | None] = [(A, None, C)[row % 3] for row in range(37)]
    (wanted,) = forward(target, slots, "q")
    monkeypatch.setattr("slotcar_sidecar.device.cuda.lane.MOST_ROWS", 16)
    (found,) = forward(target, slots, "q")
    assert_same_bits(found, wanted)
    assert BUCKETS[-1] == MOST_ROWS


def test_sites_of_one_kind_share_a_graph_and_its_memory() -> None:
    """Also in one Forward, where the memory of the first is free before the second's rows are written."""
    target = device()
    target.fill(A, FIRST)
    k, q, v = forward(target, [A, A], "k", "q", "v")
    (lane,) = target._lanes
    assert len(lane._launches) == 2
    for site, out in (("k", k), ("q", q), ("v", v)):
        assert_same_bits(out, forward(device_with(FIRST), [A, A], site)[0])
    assert not k.equal(v)


def device_with(weights: object) -> CudaDevice:
    target = device()
    target.fill(A, weights)  # type: ignore[arg-type]
    return target


def test_what_is_warm_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotcar_sidecar.device.cuda.lane.BUCKETS", (16,))
    target = device(model=ModelSpec.of([Site("k", 32, 24), Site("v", 32, 24)]))
    target.warm_up(2, lambda: False)
    kinds = [set(lane._launches) for lane in target._lanes]
    assert [len(each) for each in kinds] == [2, 2]
    with_nothing = device()
    with_nothing.warm_up(1, lambda: True)
    assert [len(lane._launches) for lane in with_nothing._lanes] == [0]
    target.fill(A, fake_weights(ModelSpec.of([Site("k", 32, 24), Site("v", 32, 24)]), {"k": 3}))
    forward(target, [A, None], "k", "v")
    assert [set(lane._launches) for lane in target._lanes] == kinds


def test_a_prepared_batch_reads_its_slots_when_it_is_executed() -> None:
    target = device_with(FIRST)
    x = to_matrix(torch.ones(1, 32))
    batch = target.prepare([(A, 1)], [ForwardItem("q", x)])
    first = to_tensor(target.execute(batch)[0]).clone()
    target.fill(A, SECOND)
    second = to_tensor(target.execute(batch)[0]).clone()
    assert not first.equal(second)
    assert_same_bits(second, to_tensor(target.execute(target.prepare([(A, 1)], [ForwardItem("q", x)]))[0]))


def test_a_failed_forward_leaves_a_device_that_computes() -> None:
    target = device_with(FIRST)
    (wanted,) = forward(target, [A, None], "q")
    ids = to_matrix(torch.tensor([[9]], dtype=torch.int32))
    embedding = device(model=ModelSpec.of([Site("embed", 9, 24, "embedding")]))
    with pytest.raises(RequestInvalid, match="0 to 8"):
        embedding.execute(embedding.prepare([(None, 1)], [ForwardItem("embed", None, aux=ids, out_dtype="float32")]))
    assert not embedding.lost
    assert_same_bits(forward(target, [A, None], "q")[0], wanted)


class Breaking(HostMachine):
    """Its pinned memory ends with the error that a kernel before it had."""

    breaks = False

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.breaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().pinned(shape, dtype)


@pytest.mark.skipif(ON_GPU, reason="a GPU that is lost is lost to all that follows")
def test_a_lost_gpu_is_asked_nothing_more() -> None:
    of = Breaking()
    target = device(of)
    target.fill(A, FIRST)
    batch = target.prepare([(A, 1)], [ForwardItem("q", to_matrix(torch.ones(1, 32)))])
    of.breaks = True
    with pytest.raises(RuntimeError, match="illegal memory access"):  # of a GPU that says afterwards that it is well
        target.execute(batch)
    assert not target.lost
    of.lost = True
    with pytest.raises(DeviceLost) as lost:
        target.execute(batch)
    assert "illegal memory access" in lost.value.facts["device_error"]
    assert "illegal memory access" in target.lost
    of.breaks, streams = False, of.streams
    for work in (lambda: target.execute(batch), lambda: target.fill(B, SECOND)):
        with pytest.raises(DeviceLost):
            work()
    assert of.streams == streams
    target.check(SECOND)


def test_slots_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_settings: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CapacityExceeded, match="more than the GPU has left"):
        DeviceSlots(MODEL, (3, 32, "float32"), machine(), poison=False)


def test_no_rows_launch_nothing() -> None:
    target = device()
    (out,) = forward(target, [], "q")
    assert out.shape == (0, 40)
    (lane,) = target._lanes
    assert isinstance(lane, Lane)
    assert not lane._launches
