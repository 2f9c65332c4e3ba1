"""A machine whose device is the CPU: streams are none, all work is complete at once, and a graph is its launches.

What a test puts into `pauses` is called where the host waits for a stream, with the stream's number, in order of their
making; and a machine can be lost. Its slots can be exported if it is given the library of a driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from slotcar_sidecar.device.cuda.exports import SlotsMemory, exportable, not_exportable

from tests.fakes.libcuda import on_host

__all__ = ["HostMachine"]


class HostMachine:
    """A Machine."""

    device = torch.device("cpu")

    def __init__(self, driver: str = "") -> None:
        self._driver = driver
        self.streams = 0
        self.pauses: list[Callable[[int], None]] = []
        self.lost = False

    def stream(self) -> _HostStream:
        self.streams += 1
        return _HostStream(self, self.streams - 1)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Garbage, as memory of the host has."""
        return torch.full(shape, math.nan if dtype.is_floating_point else 77, dtype=dtype)

    def slots_memory(self, size_bytes: int) -> SlotsMemory:
        if not self._driver:
            return not_exportable(self.device, size_bytes, "the machine has no driver")
        return exportable(self._driver, self.device, size_bytes, on_host)

    def is_lost(self) -> bool:
        return self.lost


class _HostStream:
    """A Stream of the device, and one of slotcar_kernels.triton.units."""

    device = HostMachine.device

    def __init__(self, machine: HostMachine, number: int) -> None:
        self._machine = machine
        self._number = number

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> _HostEvent:
        return _HostEvent(self._machine, self._number)

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        return launch


class _HostEvent:
    def __init__(self, machine: HostMachine, number: int) -> None:
        self._machine = machine
        self._number = number

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        for pause in self._machine.pauses:
            pause(self._number)

    def precede(self) -> None:
        """The thread's work is in order."""
