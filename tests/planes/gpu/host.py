"""The GPUs of a client without any: a driver over memory files, interpreted kernels, and a stream that is the thread.

Between `begin_late` and the wait for them, kernels are only launched: they read their slots when the host waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from slotcar_client.transports import gpus
from slotcar_kernels.triton import Prepared
from slotcar_kernels.triton.units import Event, Stream
from slotcar_kernels.vmm import Driver, GpuMemory

from tests.fakes.libcuda import library, on_host

__all__ = ["HOST", "install"]


class Host:
    """What the kernels of this process do, and have done."""

    late: bool = False
    launched: list[Callable[[], None]]
    pauses: list[Callable[[], object]]
    finished: int = 0
    index: int = -1

    def __init__(self) -> None:
        self.launched, self.pauses = [], []

    def pause(self, once: Callable[[], object]) -> None:
        """The next kernels are late, and the host does that first when it waits for them."""
        self.late = True
        self.pauses.append(once)

    def wait(self) -> None:
        pauses, self.pauses, self.late = self.pauses, [], False
        for pause in pauses:
            pause()
        launched, self.launched = self.launched, []
        for kernels in launched:
            kernels()


HOST = Host()
_execute = Prepared.execute


def execute(prepared: Prepared) -> None:
    HOST.launched.append(lambda: _execute(prepared))
    if not HOST.late:
        HOST.wait()


class HostGpus(gpus.Gpus):
    """In the order of FAKE_CUDA_GPUS."""

    def __init__(self) -> None:
        self.driver = Driver(library())

    def stream(self, index: int) -> Stream:
        HOST.index = index
        return HostStream()

    def to_tensor(self, memory: GpuMemory, _device: torch.device) -> torch.Tensor:
        return on_host(memory)

    def finish(self, _device: torch.device) -> None:
        HOST.finished += 1
        HOST.wait()


class HostStream:
    device = torch.device("cpu")

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> Event:
        return HostEvent()


class HostEvent:
    def is_done(self) -> bool:
        return not HOST.launched

    def wait(self) -> None:
        HOST.wait()

    def precede(self) -> None:
        """The thread's work is in order."""


def install() -> None:
    """From now on this process has these, and no others."""
    gpus.Gpus = HostGpus  # type: ignore[misc]
    Prepared.execute = execute  # type: ignore[method-assign]
