"""Which device the suite runs on: the CPU's, or with SLOTCAR_TEST_DEVICE=cuda that of a GPU.

Without a GPU the same class runs over the CPU's memory, with its kernels in Triton's interpreter.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from slotcar_sidecar.device.cpu import CpuDevice

__all__ = ["NAME", "AnyDevice", "cpu_only", "make_device"]

NAME = os.environ.get("SLOTCAR_TEST_DEVICE", "cpu")

AnyDevice = Any  # CpuDevice or CudaDevice, whose module is there where Triton is

cpu_only = pytest.mark.skipif(NAME != "cpu", reason="about how the CPU's device is made")


def make_device(slots: int, max_rank: int, slot_dtype: str = "float32") -> AnyDevice:
    """Whatever no fill has written is NaN."""
    if NAME == "cpu":
        return CpuDevice(slots, max_rank, slot_dtype, poison=True)
    from slotcar_sidecar.device.cuda.device import CudaDevice
    from slotcar_sidecar.device.cuda.machine import Gpu

    from tests.fakes.machine import HostMachine

    machine = Gpu() if torch.cuda.is_available() else HostMachine()
    return CudaDevice(machine, slots, max_rank, slot_dtype, poison=True)
