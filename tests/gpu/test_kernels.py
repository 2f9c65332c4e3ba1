"""The interpreter's sweep, case by case, on the GPU: the same batches, poison and float64 truth.

`make test` runs some of it in the interpreter, so that what makes the twins is known to work where there is no GPU.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from slotcar_kernels.sites import SiteSlots
from slotcar_kernels.triton import BatchPlan, SiteCall, SlicePart, prepare
from slotcar_kernels.triton.expand import expand

from tests.gpu.place import DEVICE, twin
from tests.gpu.twins import TwinBatch, TwinPlan
from tests.kernels.triton.interpreted import test_by_aux, test_linear, test_offsets, test_plan
from tests.kernels.triton.interpreted.batch import load, on_device, slots_by_row
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

SWEEP = (test_linear, test_by_aux, test_offsets, test_plan)
HERE_IN_ANOTHER_FORM = {"test_an_id_that_changes_after_its_check_reads_nothing"}


def named_tests(module: ModuleType) -> dict[str, object]:
    return {name: test for name, test in vars(module).items() if name.startswith("test_") and callable(test)}


globals().update(
    {
        f"{name}_of_{module.__name__.rpartition('.')[2].removeprefix('test_')}": test
        for module in SWEEP
        for name, test in named_tests(module).items()
        if name not in HERE_IN_ANOTHER_FORM
    }
)


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What the sweep's modules make is on the device."""
    if DEVICE.type == "cpu" and "far_apart" in request.node.name:
        pytest.skip("copies gigabytes, which the interpreter's sweep does without")
    for module in SWEEP:
        for name, value in (("Batch", TwinBatch), ("BatchPlan", TwinPlan), ("CPU", DEVICE)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(test_offsets, "run", run_twins)


def run_twins(
    site: SiteSlots, x: torch.Tensor | None, out: torch.Tensor, aux: torch.Tensor | None = None
) -> torch.Tensor:
    """As test_offsets.run, with all tensors on the device, as far apart as they were."""
    part = on_device(site)
    part = SlicePart(*map(twin, (part.a, part.b, part.ranks, part.scales)))
    plan = BatchPlan.of_bucket(test_offsets.COUNT, test_offsets.COUNT, DEVICE)
    on_gpu = [None if tensor is None else twin(tensor) for tensor in (x, aux)]
    call = SiteCall([part], twin(out), on_gpu[0], None, on_gpu[1])
    prepared = prepare(plan, call)
    plan.write(slots_by_row(test_offsets.ENTRIES))
    plan.execute()
    prepared.execute()
    return call.out.cpu()


def test_every_module_of_the_sweep_is_here() -> None:
    """But that of the checks, which launch nothing."""
    there = {path.stem for path in Path(test_plan.__file__).parent.glob("test_*.py")}
    here = {module.__name__.rpartition(".")[2] for module in SWEEP}
    assert there - here == {"test_checks"}


def test_an_id_that_changes_after_its_check_reads_nothing() -> None:
    of_test = test_by_aux.embedding_batch(torch.bfloat16, torch.bfloat16, "delta")
    plan, site = of_test.prepare()
    load(plan, of_test.slots)
    plan.execute()
    site.execute()
    row = next(row for row, slot in enumerate(of_test.slots) if slot >= 0)
    arguments, constants = site.expand_launch
    site.call.aux[row] = 1 << 30
    expand[(2,)](*arguments, **constants)
    wanted = of_test.truth()
    wanted[row] = 0
    assert_close(site.call.out[: of_test.rows].cpu(), wanted)
