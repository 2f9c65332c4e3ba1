"""`slotcar serve` on a GPU; without one, on the same device over the CPU's memory, in Triton's interpreter.

python -m tests.gpu.serve serve --device cuda ...
"""

from __future__ import annotations

import torch
from slotcar_sidecar.cli import main
from slotcar_sidecar.device.cuda import machine
from slotcar_sidecar.process import devices

from tests.fakes.machine import HostMachine

if __name__ == "__main__":
    if not torch.cuda.is_available():
        machine.Gpu = HostMachine  # type: ignore[assignment,misc]
        devices.why_no_gpu = lambda _max_rank: ""
    main()
