"""From PEFT's files to the rows of a Forward: every variant that the store reads, through a poisoned slot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slotcar_client.engines.transformers import model_spec
from slotcar_kernels.buffers import buffer_from_tensor, tensor_from_buffer
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.rpc.convert_model import to_model
from slotcar_sidecar.store.sources.local import LocalSource

from tests.adapters import make_adapter, peft_deltas
from tests.unit.store.test_peft import VARIANTS

FIRST, SECOND = SlotId(0), SlotId(1)


def matrix(x: torch.Tensor) -> Matrix:
    dtype, rows, columns, data = buffer_from_tensor(x)
    return Matrix(dtype, rows, columns, columns, data)


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft")
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_pefts_before_and_after_an_eviction(variant: str, tmp_path: Path) -> None:
    build, settings = VARIANTS[variant]
    model = build()
    folder = make_adapter(tmp_path / "adapter", model, **settings)
    other = make_adapter(tmp_path / "other", model, seed=9, r=16, target_modules=settings.get("target_modules"))
    source = LocalSource([tmp_path], 1 << 30)
    weights, others = source.read(str(folder)), source.read(str(other))

    device = CpuDevice(slots=2, max_rank=96, poison=True)
    device.shape(to_model(model_spec(model)))
    for slot in (FIRST, SECOND):
        device.fill(slot, others)
        device.fill(slot, weights)
        assert device.matches(slot, weights)
        for site, (x, wanted) in peft_deltas(folder, model).items():
            batch = device.prepare([(None, 1), (slot, len(x))], [ForwardItem(site, matrix(torch.cat([x[:1], x])))])
            (out,) = device.execute(batch)
            found = tensor_from_buffer(out.dtype, out.rows, out.columns, out.row_stride, out.data)
            assert not found[0].any()
            torch.testing.assert_close(found[1:], wanted, rtol=1e-5, atol=1e-5)
