"""What it costs to load an adapter of 192 sites, each of 4096 features, whose file is in the page cache.

fill of A, fill: a slot of the CPU device, from verified tensors in the host tier: an adapter whose digest is known, as
from its second load on. The peer is one memcpy of as many bytes, from memory of the same kind to the slots file. A is
copied, or cast; B is transposed too. The slots' pages are there before.

fill and first load, against PEFT's load_adapter of the same file: a first load reads, checks, hashes and fills. PEFT
runs as it does by itself (`peft_options` "default"), and in the fastest way that it has here ("fastest"): without
random values first, and without a cast to float32.
"""

from __future__ import annotations

import ctypes
import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from slotcar_kernels import native
from slotcar_kernels.fill import SlotArray, fill_slot
from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.model import ModelSpec, Site
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.store.memory import private_memory
from slotcar_sidecar.store.sources.local import LocalSource
from slotcar_sidecar.store.weights import HostWeights

from tests.adapters import raw_tensors, write_raw_adapter
from tests.bench.harness import Call, Peer, Record, Took, compare, timed
from tests.bench.sizes import Size, size_wanted

SITES = tuple(f"layers.{layer}.{name}" for layer in range(32) for name in ("q", "k", "v", "o", "up", "down"))
FEATURES = 4096
SLOT, OTHER_SLOT = SlotId(0), SlotId(1)
PEFT_OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "default": {},
    "fastest": {"low_cpu_mem_usage": True, "autocast_adapter_dtype": False},
}


@dataclass(frozen=True)
class Case:
    rank: int
    dtype: str
    slot_dtype: str


TARGETS = (Case(96, "bfloat16", "bfloat16"), Case(16, "bfloat16", "bfloat16"))
OTHERS = (Case(16, "float32", "float32"), Case(16, "float32", "bfloat16"), Case(16, "bfloat16", "float32"))


def write_adapter(case: Case, folder: Path) -> Path:
    """The adapter's two files."""
    config = {
        "peft_type": "LORA",
        "r": case.rank,
        "lora_alpha": 8,
        "target_modules": ["q", "k", "v", "o", "up", "down"],
    }
    tensors = raw_tensors(*SITES, rank=case.rank, features=(FEATURES, FEATURES))
    return write_raw_adapter(folder, config, {name: t.to(getattr(torch, case.dtype)) for name, t in tensors.items()})


def make_device(case: Case) -> CpuDevice:
    device = CpuDevice(slots=2, max_rank=case.rank, slot_dtype=case.slot_dtype)
    device.shape(ModelSpec.of([Site(name, FEATURES, FEATURES) for name in SITES]))
    return device


def make_memcpy(device: CpuDevice, size: int) -> Call:
    """One copy of `size` bytes into a slot."""
    assert device.file is not None
    source, slots = private_memory(size), device.file.memory
    source[:] = bytes(range(256)) * (size // 256)
    target = ctypes.addressof(ctypes.c_char.from_buffer(slots, device.file.geometry.slot_offset(OTHER_SLOT)))
    start = ctypes.addressof(ctypes.c_char.from_buffer(source))
    return lambda: (ctypes.memmove(target, start, size), source)


def make_fill_of_a(device: CpuDevice, weights: HostWeights) -> Call:
    arrays = [SlotArray(device._arrays[site].a[SLOT, : len(a)], a) for site, a in weights.a.items()]
    return lambda: fill_slot(arrays)


def make_peft(case: Case) -> PeftModel:
    """A model with the sites, whose own weights take no memory, and an adapter of rank 1 to begin with."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(len(SITES)))
    weight = torch.zeros(1, 1, dtype=getattr(torch, case.slot_dtype)).expand(FEATURES, FEATURES)
    for site in SITES:
        _, layer, name = site.split(".")
        linear = torch.nn.Linear(FEATURES, FEATURES, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        model.layers[int(layer)].add_module(name, linear)
    names = ["q", "k", "v", "o", "up", "down"]
    return get_peft_model(model, LoraConfig(r=1, target_modules=names), autocast_adapter_dtype=False)


def against_peft(case: Mapping[str, Any], calls: Mapping[str, Call], folder: Path, model: PeftModel, runs: int) -> None:
    """Prints a record for each call of ours and each way of PEFT's."""
    times: dict[str, list[Took]] = {name: [] for name in (*calls, *PEFT_OPTIONS)}
    for turn in range(runs + 1):
        for what, call in calls.items():
            times[what].append(timed(call))
        for way, options in PEFT_OPTIONS.items():
            name = f"{way}-{turn}"
            times[way].append(timed(partial(model.load_adapter, str(folder), name, **options)))
            model.delete_adapter(name)
    for what, way in itertools.product(calls, PEFT_OPTIONS):
        target = {"target": True} if (what, way) == ("fill", "default") else {}
        described = {**case, "what": what, "peft": peft.__version__, "peft_options": way, **target}
        Record.of("load", described, ("slotcar", times[what][1:]), ("peft", times[way][1:])).printed()


def run(case: Case, root: Path, size: Size) -> None:
    folder = write_adapter(case, root / "-".join(map(str, asdict(case).values())))
    source, device = LocalSource([root], 1 << 31), make_device(case)
    weights = source.read(str(folder))
    for slot in (SLOT, OTHER_SLOT):
        device.fill(slot, weights)
    assert device.matches(SLOT, weights)

    def fill() -> None:
        device.fill(SLOT, weights)

    def first_load() -> None:
        device.fill(SLOT, source.read(str(folder)))

    described = {**asdict(case), "mib": weights.adapter.bytes >> 20, "kernel": native.backend()}
    marked = {"target": True} if case in TARGETS else {}
    slot_bytes = device.slot_bytes()
    for what, call, copied in (
        ("fill of A", make_fill_of_a(device, weights), slot_bytes // 2),
        ("fill", fill, slot_bytes),
    ):
        peers: dict[Peer, Call] = {"memcpy": make_memcpy(device, copied)}
        compare("load", {**described, "what": what, **marked}, ("slotcar", call), peers, size.pick(2, 15, 30))
    if case in TARGETS:
        calls = {"fill": fill, "first load": first_load}
        against_peft(described, calls, folder, make_peft(case), size.pick(1, 3, 7))


def main() -> None:
    size = size_wanted(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="slotcar-bench-") as temporary:
        for case in size.pick(TARGETS[1:], TARGETS, TARGETS + OTHERS):
            run(case, Path(temporary), size)


if __name__ == "__main__":
    main()
