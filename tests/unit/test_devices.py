"""Where the slots are: as the settings say, and as the machine allows."""

from __future__ import annotations

import asyncio

import pytest
import torch
from slotcar_sidecar.config import Config
from slotcar_sidecar.device import found
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.process import devices, planes
from slotcar_sidecar.process.sockets import StartError

UNIX = "unix:///run/s.sock"


def test_a_gpu_that_cannot_be_used_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "why_no_gpu", lambda max_rank: f"ranks up to {max_rank - 1}")
    with pytest.raises(StartError, match="--device cuda cannot be used: ranks up to 63"):
        devices.make_device(Config(listen=(UNIX,), device="cuda"), "e" * 32)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_without_a_gpu_slots_are_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "why_no_gpu", lambda _max_rank: "no")
    config = Config(listen=(UNIX,), device=name)
    device = devices.make_device(config, "e" * 32)
    assert isinstance(device, CpuDevice)
    assert device.slots == config.slots


@pytest.mark.parametrize("name", ["auto", "cuda", "cpu"])
def test_a_device_of_either_kind_has_all_planes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes.platform, "machine", lambda: "x86_64")
    assert planes.offered_planes(Config(listen=(UNIX,), device=name)) == ("stream", "ring", "direct")


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "find_spec", lambda _name: None)
    assert found.why_no_gpu(64) == "Triton is not installed"
    monkeypatch.setattr(found, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found.why_no_gpu(64) == "torch sees no GPU"


async def test_the_cpu_needs_no_warming_and_is_not_lost() -> None:
    device = CpuDevice(1, 16)
    await devices.warm_up(device, 1, asyncio.Event(), pool=None)  # type: ignore[arg-type]
    await devices.watch(device, health=None)  # type: ignore[arg-type]
