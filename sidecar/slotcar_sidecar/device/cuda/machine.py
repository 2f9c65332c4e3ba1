"""What the device asks of a GPU beside kernels: memory to copy from, streams, their events, and graphs.

All else here is written against `Machine`, so that it also runs where tensors are on the CPU and streams are none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from slotcar_kernels import vmm
from torch import Tensor

from slotcar_sidecar.device.cuda.exports import SlotsMemory, exportable

__all__ = ["Event", "Gpu", "Machine", "Stream"]


class Event(Protocol):
    """A place in a stream's work."""

    def is_done(self) -> bool:
        """Whether all work before it is complete."""

    def wait(self) -> None:
        """Returns once all work before it is complete; the calling thread waits, no stream does."""


class Stream(Protocol):
    """Work in order, which waits for no other stream's."""

    def current(self) -> AbstractContextManager[object]:
        """Where the thread's work goes in the meantime."""

    def event(self) -> Event:
        """The place behind all work so far."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Runs `launch` once, to compile what it needs, and returns what runs it again on the current stream."""


class Machine(Protocol):
    """One GPU."""

    device: torch.device

    def stream(self) -> Stream:
        """A new one."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that the GPU copies from and to while others compute; with any values."""

    def slots_memory(self, size_bytes: int) -> SlotsMemory:
        """Memory on the device, with any values, for others to map if that can be. Raises torch.OutOfMemoryError."""

    def is_lost(self) -> bool:
        """Whether the GPU computes no more for this process, whatever it is asked."""


class Gpu:
    """The GPU of this process."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)

    def stream(self) -> Stream:
        return _GpuStream(self.device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def slots_memory(self, size_bytes: int) -> SlotsMemory:
        torch.empty(1, device=self.device)  # so that the thread has the device's context
        return exportable(vmm.LIBRARY, self.device, size_bytes, self._to_tensor)

    def _to_tensor(self, memory: vmm.GpuMemory) -> Tensor:
        return torch.as_tensor(memory, device=self.device)

    def is_lost(self) -> bool:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False


class _GpuEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class _GpuStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def event(self) -> Event:
        return _GpuEvent(self._stream)

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with self.current():
            launch()
            self._stream.synchronize()
            # Other threads may do anything meanwhile; `torch.cuda.graph` would wait for all of their work.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph.replay
