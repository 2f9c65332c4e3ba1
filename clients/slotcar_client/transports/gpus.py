"""The GPUs that this process sees, and the slots' memory on the one of them that the sidecar uses.

Invariant: the memory is that of the GPU whose UUID the sidecar says, whatever number this process has for it; and it is
unmapped only once that GPU has done all that this process asked of it.
"""

from __future__ import annotations

import contextlib
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from slotcar.shm.slots import GpuPlace
from slotcar_kernels.vmm import Driver, DriverError, GpuMemory

from slotcar_client.errors import RequestInvalid

if TYPE_CHECKING:
    from slotcar_kernels.triton.units import Stream

__all__ = ["GpuSlots", "Gpus", "map_slots"]


class GpuSlots(NamedTuple):
    """All bytes of the slots' memory, also as a tensor, and the caller's stream on their GPU."""

    memory: GpuMemory
    bytes: torch.Tensor
    stream: Stream


class Gpus:
    """As torch numbers them."""

    def __init__(self) -> None:
        """Raises DriverError where there are none."""
        if not torch.cuda.is_available():
            raise DriverError("torch sees no GPU in this process")
        self.driver = Driver()

    def stream(self, index: int) -> Stream:
        from slotcar_kernels.triton.units import CurrentStream

        device = torch.device("cuda", index)
        torch.empty(1, device=device)  # so that the thread has the device's context
        return CurrentStream(device)

    def to_tensor(self, memory: GpuMemory, device: torch.device) -> torch.Tensor:
        """All bytes, in a tensor that keeps the memory."""
        return torch.as_tensor(memory, device=device)

    def finish(self, device: torch.device) -> None:
        """Returns once the device has done all work of this process, or does none any more."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)


def map_slots(descriptor: int, place: GpuPlace) -> GpuSlots:
    """Raises RequestInvalid where this process cannot read the slots, or compute from them."""
    if find_spec("triton") is None:
        raise _refusal("Triton is not installed")
    try:
        gpus = Gpus()
        index = gpus.driver.device_of(place.uuid)
        if index is None:
            raise _refusal(f"this process does not see the slots' GPU, {place.uuid.hex()}")
        stream = gpus.stream(index)
        finish = partial(gpus.finish, stream.device)
        memory = gpus.driver.take(index, descriptor, place.size_bytes, finish)
        return GpuSlots(memory, gpus.to_tensor(memory, stream.device), stream)
    except (DriverError, RuntimeError) as error:
        raise _refusal(str(error)) from error


def _refusal(why: str) -> RequestInvalid:
    message = f"the slots are on a GPU, and cannot be read here: {why}"
    return RequestInvalid(message, field="transport", found="direct", wanted="auto, ring or stream")
