"""One torch thread, and a kernel that is each of those which run here in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from slotcar_kernels import native
from slotcar_kernels.cpu import Kernel

NAMES = ("torch", *native.ISAS)


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread() -> Iterator[None]:
    """These matrices are small, and threads on a busy machine would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=NAMES)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return runnable(request.param)


@pytest.fixture(params=native.ISAS)
def compiled(request: pytest.FixtureRequest) -> Kernel:
    return runnable(request.param)


def runnable(name: str) -> Kernel:
    best = native.best_isa()
    if name != "torch" and (best is None or native.ISAS.index(name) > native.ISAS.index(best)):
        pytest.skip(f"there is {native.backend()}")
    return Kernel(name)
