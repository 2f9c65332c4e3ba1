"""What the museum's tests share: steps that tests.fakes has not, a small device, its truth, and files to read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping as Table
from typing import Any

import torch
from safetensors.torch import save
from slotcar_kernels.buffers import buffer_from_tensor, tensor_from_buffer
from slotcar_kernels.cpu import lora_forward
from slotcar_kernels.plan import plan_rows
from slotcar_kernels.reference import lora_delta
from slotcar_kernels.sites import SiteSlots
from slotcar_sidecar.core.bindings import OnConflict
from slotcar_sidecar.core.calls import LoadCall, Loaded
from slotcar_sidecar.core.forward import ForwardItem
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.core.tensor import Matrix
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.store.peft import read_peft
from slotcar_sidecar.store.weights import HostWeights

from tests.adapters import MINIMAL_CONFIG, raw_tensors
from tests.fakes.parts import SITE, Bench, digest_of
from tests.fakes.steps import finish, ref
from tests.fakes.weights import FakeWeights
from tests.kernels.cases import Entries

Q = "model.layers.0.self_attn.q_proj"
SPEC = ModelSpec.of([Site("k", 33, 18), Site("q", 33, 40)])
CONFIG = json.dumps(dict(MINIMAL_CONFIG)).encode()


def digest(content: str) -> str:
    return str(digest_of(content))


# Steps at the cache


def start_load_from(bench: Bench, name: str, source: str, *, replace: bool = False) -> asyncio.Task[Loaded]:
    """A load of what is, or is not, at `source`, under way."""
    call = LoadCall(ref(name), source, OnConflict.REPLACE if replace else OnConflict.FAIL)
    return asyncio.get_running_loop().create_task(bench.cache.load(call))


def weights_file(seed: int) -> bytes:
    """An adapter_model.safetensors for the fakes' one site."""
    data: bytes = save(raw_tensors(SITE, features=(8, 8), seed=seed))
    return data


async def uploaded(bench: Bench, name: str, weights: bytes, *, config: bytes = CONFIG, replace: bool = False) -> Loaded:
    """An adapter that came with its call. Raises what refuses it."""
    work = _upload(bench, name, (config, weights), replace)
    (result,) = await finish(bench, asyncio.get_running_loop().create_task(work))
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, Loaded)
    return result


async def _upload(bench: Bench, name: str, files: tuple[bytes, bytes], replace: bool) -> Loaded:
    config, weights = files
    with bench.cache.upload(len(config), len(weights)) as upload:
        upload.add_config(config)
        upload.add_weights(weights)
        on_conflict = OnConflict.REPLACE if replace else OnConflict.FAIL
        return await bench.cache.load(LoadCall(ref(name), on_conflict=on_conflict, upload=upload))


# A device and its kernel


def device(slots: int = 2, max_rank: int = 32, model: ModelSpec = SPEC) -> CpuDevice:
    made = CpuDevice(slots, max_rank, poison=True)
    made.shape(model)
    return made


def delta(target: CpuDevice, slot: int, site: Site, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and what the slot makes of it."""
    x = torch.randn(rows, site.in_features, generator=torch.Generator().manual_seed(rows))
    dtype, count, columns, data = buffer_from_tensor(x)
    item = ForwardItem(site.name, Matrix(dtype, count, columns, columns, data))
    (out,) = target.execute(target.prepare([(SlotId(slot), rows)], [item]))
    return x, tensor_from_buffer(out.dtype, out.rows, out.columns, out.row_stride, out.data)


def truth(weights: FakeWeights, site: Site, x: torch.Tensor) -> torch.Tensor:
    scale = {part.site: part.scale for part in weights.adapter.parts}[site.name]
    return lora_delta(x, weights.a[site.name], weights.b[site.name], scale)


def kernel(entries: Entries, x: torch.Tensor, site: SiteSlots, base: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((x.shape[0], site.out_features), torch.nan)
    lora_forward(plan_rows(entries), x, [site], [out], None if base is None else [base])
    return out


# Files


def read(tensors: Table[str, torch.Tensor], **fields: Any) -> HostWeights:
    """The adapter with these tensors, whose configuration has `fields` beside what it must have."""
    return read_peft(json.dumps(dict(MINIMAL_CONFIG) | fields).encode(), save(dict(tensors)), source="test")
