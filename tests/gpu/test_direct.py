"""Slots that one process fills on a GPU, and another computes from: its bits, its checks, and the first one's end.

On a machine with a GPU this is its driver, and real kernels and events; it needs no gRPC.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from slotcar.shm import slots
from slotcar.shm.mapping import map_file
from slotcar.shm.slots import GpuPlace, LeafShape, SlotsGeometry
from slotcar_kernels import vmm
from slotcar_kernels.guard import Change, Changed, Guard, Watch, WriterWords
from slotcar_kernels.triton import SlicePart
from slotcar_kernels.triton.units import CurrentStream, Stream, Unit, Units, UnitSite
from slotcar_sidecar.device.leaves import LeafArrays

from tests.fakes.libcuda import library, on_host
from tests.fakes.machine import HostMachine
from tests.gpu.place import DEVICE
from tests.gpu.writer import DTYPE, EPOCH, MAX_RANK, MODEL, SITES, SLOTS, digest, rows

pytestmark = pytest.mark.gpu

ON_GPU = DEVICE.type == "cuda"


class Engine:
    """A process of an engine: this one, with a writer that is its child."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.writer = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.writer", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        _, (file, weights), _, _ = socket.recv_fds(self.link, 16, 2)
        shapes = [LeafShape(leaf.in_features, leaf.out_features) for leaf in MODEL.leaves]
        self.geometry = SlotsGeometry(SLOTS, MAX_RANK, DTYPE, shapes, on_gpu=True)
        self.file = map_file(file, self.geometry.total_bytes, writable=False)
        self.geometry.check(self.file, EPOCH)
        place = GpuPlace.read(self.file, self.geometry)
        driver = vmm.Driver(vmm.LIBRARY if ON_GPU else library())
        index = driver.device_of(place.uuid)
        assert index is not None
        self.stream: Stream = CurrentStream(DEVICE) if ON_GPU else HostMachine().stream()
        torch.empty(1, device=self.stream.device)
        finish = torch.cuda.synchronize if ON_GPU else int
        memory = driver.take(index, weights, place.size_bytes, finish)
        self.memory = torch.as_tensor(memory, device=DEVICE) if ON_GPU else on_host(memory)
        for descriptor in (file, weights):
            os.close(descriptor)
        words = np.frombuffer(self.file, np.uint64, self.geometry.parts_offset // 8)
        self._region_closed = np.zeros(1, np.uint64)
        self.watch = Watch(
            WriterWords(words[4:6], words[8:9], self._region_closed, words[16 : 16 + SLOTS]),
            EPOCH.encode(),
            self.link.fileno(),
        )
        self.units = Units(self.stream, SLOTS)
        self.parts = [self._part(index) for index in range(len(MODEL.leaves))]

    def _part(self, index: int) -> list[SlicePart]:
        memory = self.memory.view(torch.float32), self.memory.view(torch.float32)
        arrays = LeafArrays.of_slots(memory, self.geometry, index)
        ranks, scales = torch.zeros(SLOTS, dtype=torch.int32), torch.zeros(SLOTS)
        for slot in range(SLOTS):
            ranks[slot], scales[slot], _ = slots.PART.unpack_from(self.file, self.geometry.part_offset(slot, index))
        return [SlicePart(arrays.a, arrays.b, ranks.to(DEVICE), scales.to(DEVICE))]

    def ask(self, command: str) -> str:
        assert self.writer.stdin is not None
        assert self.writer.stdout is not None
        print(command, file=self.writer.stdin, flush=True)
        return self.writer.stdout.readline().strip()

    def load(self, slot: int, seed: int) -> int:
        self.ask(f"begin {slot}")
        self.ask(f"write {slot} {seed}")
        generation = int(self.ask(f"end {slot}"))
        self.parts = [self._part(index) for index in range(len(MODEL.leaves))]
        return generation

    def begin(self, of_rows: list[int], generation: int) -> Unit:
        guard = Guard(self.watch, sorted(set(of_rows)), generation)
        x = rows(len(of_rows)).to(DEVICE)
        sites = [UnitSite(parts, torch.float32, x) for parts in self.parts]
        return self.units.begin(self.units.batch(guard, of_rows), sites)

    def close(self) -> None:
        self.writer.kill()
        self.writer.wait()
        self.link.close()
        for pipe in (self.writer.stdin, self.writer.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_both_compute_the_same_bits(engine: Engine) -> None:
    engine.load(0, 1)
    generation = engine.load(2, 2)
    for of_rows in ([0], [2, 0, 0], [0, 2] * 20):
        out = engine.begin(of_rows, generation).take()
        assert [part.shape for part in out] == [(len(of_rows), MODEL.by_name[site].out_features) for site in SITES]
        assert digest(out) == engine.ask(f"forward {' '.join(map(str, of_rows))}")


def test_units_that_were_launched_before_a_slot_changed_give_nothing_after(engine: Engine) -> None:
    generation = engine.load(0, 1)
    units = [engine.begin([0] * 40, generation) for _ in range(50 if ON_GPU else 2)]
    before = digest(units[0].take())
    again = engine.load(0, 3)
    for unit in units[1:]:
        with pytest.raises(Changed) as changed:
            unit.take()
        assert changed.value.change is Change.STALE_AFTER
    with pytest.raises(Changed) as changed:
        engine.begin([0], generation)
    assert changed.value.change is Change.STALE_BEFORE
    assert digest(engine.begin([0] * 40, again).take()) != before


def test_a_load_of_another_slot_changes_nothing(engine: Engine) -> None:
    generation = engine.load(0, 1)
    unit = engine.begin([0] * 8, generation)
    engine.load(1, 4)
    assert digest(unit.take()) == engine.ask("forward " + " ".join("0" * 8))


def test_the_memory_of_a_writer_that_was_killed_stays_and_is_not_believed() -> None:
    engine = Engine()
    generation = engine.load(0, 1)
    engine.begin([0], generation).take()
    bits = engine.memory.view(torch.uint8)[: engine.geometry.weights_bytes].cpu()
    unit = engine.begin([0], generation)
    engine.writer.kill()
    engine.writer.wait()
    with pytest.raises(Changed) as changed:
        unit.take()
    assert changed.value.change is Change.GONE
    assert torch.equal(engine.memory.view(torch.uint8)[: engine.geometry.weights_bytes].cpu(), bits)
    engine.close()
