"""What it costs to load an adapter: `python -m tests.bench.load [--quick]`.

The adapter has 192 sites of 4096 features; its file is in the page cache. What is measured:

  fill        a slot of the CPU device from the verified tensors in the host tier: an adapter whose digest is known.
              The peer is one memcpy of as many bytes, from the same kind of memory to the same slots file. A alone is
              copied or cast, B is transposed too.
  fill        the same against PEFT's load_adapter of the same file, which has no bytes in memory. PEFT runs in the
              fastest way that it has here: without random values first, and without a cast to float32.
  first load  reading the file, checking, hashing and filling, against PEFT's load_adapter.

The slots' pages are there before the first measurement, as they are from an adapter's second load on.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
from slotcar_sidecar.store.source import LocalSource
from slotcar_sidecar.store.weights import HostWeights

from tests.adapters import raw_tensors, write_raw_adapter
from tests.bench.harness import Call, Record, Took, compare, timed

SITES = tuple(f"layers.{layer}.{name}" for layer in range(32) for name in ("q", "k", "v", "o", "up", "down"))
FEATURES = 4096
SLOT, OTHER_SLOT = SlotId(0), SlotId(1)
MEMCPY_RUNS, PEFT_RUNS = 15, 5


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
    arrays = [SlotArray(device._a[site][SLOT, : len(a)], a) for site, a in weights.a.items()]
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


def against_peft(case: Mapping[str, Any], calls: Mapping[str, Call], folder: Path, model: PeftModel) -> None:
    """Prints one record per call of ours."""
    times: dict[str, list[Took]] = {name: [] for name in (*calls, "peft")}
    for name in map(str, range(PEFT_RUNS + 1)):
        for what, call in calls.items():
            times[what].append(timed(call))
        times["peft"].append(timed(lambda name=name: load_with_peft(model, folder, name)))
        model.delete_adapter(name)
    for what in calls:
        described = {**case, "what": what, "target": what == "fill", "peft": peft.__version__}
        Record.of("load", described, ("slotcar", times[what][1:]), ("peft", times["peft"][1:])).printed()


def load_with_peft(model: PeftModel, folder: Path, name: str) -> None:
    model.load_adapter(str(folder), name, low_cpu_mem_usage=True, autocast_adapter_dtype=False)


def run(case: Case, root: Path, target: bool) -> None:
    folder = write_adapter(case, root / "-".join(map(str, asdict(case).values())))
    source, device = LocalSource([root], 1 << 31), make_device(case)
    weights = source.read(str(folder))
    for slot in (SLOT, OTHER_SLOT):
        device.fill(slot, weights)
    assert device.matches(SLOT, weights)

    size = device.slot_bytes()
    described = {**asdict(case), "mib": weights.adapter.bytes >> 20, "kernel": native.backend()}
    marked = {"target": True} if target else {}
    for what, call, part in (
        ("fill of A", make_fill_of_a(device, weights), size // 2),
        ("fill", lambda: device.fill(SLOT, weights), size),
    ):
        compare(
            "load",
            {**described, "what": what, **marked},
            ("slotcar", call),
            {"memcpy": make_memcpy(device, part)},
            MEMCPY_RUNS,
        )
    if target:
        calls = {
            "fill": lambda: device.fill(SLOT, weights),
            "first load": lambda: device.fill(SLOT, source.read(str(folder))),
        }
        against_peft(described, calls, folder, make_peft(case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the adapter of 50 MB alone")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cases = TARGETS[1:] if arguments.quick else TARGETS + OTHERS
    with tempfile.TemporaryDirectory(prefix="slotcar-bench-") as temporary:
        for case in cases:
            run(case, Path(temporary), case in TARGETS)


if __name__ == "__main__":
    main()
