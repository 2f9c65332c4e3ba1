"""The slots file of slots on a GPU: words and parts as on the CPU, and the weights elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from slotcar.shm import slots
from slotcar.shm.slots import BadSlotsFile, GpuPlace, LeafShape, SlotsGeometry
from slotcar_sidecar.device.slots_file import SlotsFile

EPOCH = "0123456789abcdef"
CPU = SlotsGeometry(3, 8, "float16", [LeafShape(24, 16), LeafShape(16, 8, experts=2)])
GPU = replace(CPU, on_gpu=True)
PLACE = GpuPlace(bytes(range(16)), GPU.weights_bytes + 100)


def test_only_the_weights_are_elsewhere() -> None:
    assert GPU.total_bytes == CPU.weights_offset
    assert CPU.total_bytes == GPU.total_bytes + GPU.weights_bytes
    for name in ("a_offsets", "b_offsets", "v_offsets", "parts_offset", "slot_bytes", "weights_bytes"):
        assert getattr(GPU, name) == getattr(CPU, name)


def test_the_header_says_where() -> None:
    file = SlotsFile(GPU, EPOCH, PLACE)
    GPU.check(file.memory, EPOCH)
    assert GpuPlace.read(file.memory, GPU) == PLACE
    assert [word for word in file.memory[slots.CLOSED_OFFSET : slots.UUID_OFFSET] if word] == []


@pytest.mark.parametrize(("written", "read", "found"), [(CPU, GPU, 2), (GPU, CPU, 3)])
def test_one_kind_is_not_taken_for_the_other(written: SlotsGeometry, read: SlotsGeometry, found: int) -> None:
    file = SlotsFile(written, EPOCH, PLACE if written is GPU else None)
    with pytest.raises(BadSlotsFile, match=f"version {found}, wanted {5 - found}"):
        read.check(file.memory, EPOCH)


def test_memory_without_room_for_the_weights_is_refused() -> None:
    file = SlotsFile(GPU, EPOCH, PLACE._replace(size_bytes=GPU.weights_bytes - 1))
    with pytest.raises(BadSlotsFile, match=f"memory has {GPU.weights_bytes - 1} bytes, wanted {GPU.weights_bytes}"):
        GpuPlace.read(file.memory, GPU)
