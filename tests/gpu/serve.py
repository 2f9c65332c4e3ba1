"""`slotcar serve` on a GPU; without one, on the same device over the CPU's memory, in Triton's interpreter.

python -m tests.gpu.serve serve --device cuda ...

Its slots are in the memory of tests/fakes/libcuda, or with an empty SLOTCAR_TEST_DRIVER in some that has no driver.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from slotcar_sidecar.cli import main
from slotcar_sidecar.device.cuda import machine
from slotcar_sidecar.process import devices

from tests.fakes.libcuda import library
from tests.fakes.machine import HostMachine

if __name__ == "__main__":
    if not torch.cuda.is_available():
        driver = library() if "SLOTCAR_TEST_DRIVER" not in os.environ else ""
        machine.Gpu = partial(HostMachine, driver)  # type: ignore[assignment,misc]
        devices.why_no_gpu = lambda _max_rank: ""
    main()
