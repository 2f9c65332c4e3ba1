"""`slotcar serve` with its slots on a GPU: tests.gpu.serve, in a process that has Triton."""

from __future__ import annotations

from dataclasses import dataclass

from tests.server import SidecarProcess


@dataclass
class GpuSidecar(SidecarProcess):
    def command(self) -> list[str]:
        command = ["tests.gpu.serve" if part == "slotcar_sidecar" else part for part in super().command()]
        return [*command, "--device", "cuda"]
