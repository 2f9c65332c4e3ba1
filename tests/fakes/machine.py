"""A machine whose device is the CPU: streams are none, all work is complete at once, and a graph is its launches.

What a test puts into `pauses` is called where the host waits for a stream, with the stream's number, in order of their
making; and a machine can be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["HostMachine"]


class HostMachine:
    """A Machine."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.streams = 0
        self.pauses: list[Callable[[int], None]] = []
        self.lost = False

    def stream(self) -> _HostStream:
        self.streams += 1
        return _HostStream(self, self.streams - 1)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Garbage, as memory of the host has."""
        return torch.full(shape, math.nan if dtype.is_floating_point else 77, dtype=dtype)

    def is_lost(self) -> bool:
        return self.lost


class _HostStream:
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
