"""The memory that all slots lie in: made so that engines on the same GPU can map it, where the driver can do that.

Invariant: its address stays for the life of the process, and who has mapped it can read it beyond that life.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from slotcar.shm.slots import GpuPlace
from slotcar_kernels.vmm import Driver, DriverError, GpuMemory, OutOfGpuMemory
from torch import Tensor

__all__ = ["SlotsMemory", "exportable", "not_exportable"]


@dataclass(frozen=True, slots=True, eq=False)
class SlotsMemory:
    """`bytes` are the slots'. `place` and `descriptor` are for engines; without a place `why_not` says why."""

    bytes: Tensor
    place: GpuPlace | None = None
    descriptor: int = -1
    why_not: str = ""


def exportable(
    library: str, device: torch.device, size_bytes: int, to_tensor: Callable[[GpuMemory], Tensor]
) -> SlotsMemory:
    """Memory of the driver's, or else of torch's, which nobody can map. Raises torch.OutOfMemoryError.

    `to_tensor` makes a tensor of all bytes, which keeps the memory.
    """
    try:
        driver, index = Driver(library), device.index or 0
        made = driver.make(index, size_bytes)
        assert made.descriptor is not None
        return SlotsMemory(to_tensor(made), GpuPlace(driver.uuid(index), made.size_bytes), made.descriptor)
    except OutOfGpuMemory as error:
        raise torch.OutOfMemoryError(str(error)) from error
    except (DriverError, RuntimeError) as error:
        return not_exportable(device, size_bytes, str(error))


def not_exportable(device: torch.device, size_bytes: int, why_not: str) -> SlotsMemory:
    """Memory of torch's. Raises torch.OutOfMemoryError."""
    return SlotsMemory(torch.empty(size_bytes, dtype=torch.uint8, device=device), why_not=why_not)
