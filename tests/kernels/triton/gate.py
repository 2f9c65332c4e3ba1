"""What Triton's compiler makes of the kernels, without a GPU: registers, spills, shared memory, widths of loads.

    python -m tests.kernels.triton.gate [--fast] [--target TARGET] [--case TEXT] [--json] [--write]

Compiles the very launches that `prepare` makes, with the divisibility that the JIT would see in their arguments, for
NVIDIA's Ampere and Hopper and AMD's MI300, and reads the machine code. --write puts the table into
docs/measurements/triton.md. Needs Triton, and must not run interpreted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from slotcar_kernels.triton import BatchPlan, Prepared, SiteCall, SlicePart, prepare
from slotcar_kernels.triton import plan as plan_module
from slotcar_kernels.triton.expand import expand
from slotcar_kernels.triton.shrink import shrink
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PAGE = Path(__file__).resolve().parents[3] / "docs/measurements/triton.md"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BUCKETS = {"decode": 64, "prefill": 1024}
WIDTH, SLOTS, TOKENS, EXPERTS = 4096, 2, 1000, 8
PREFACE = """\
# GPU kernels, as compiled

What the compiler of Triton {version} makes of the launches of `slotcar_kernels.triton`, without a GPU. This page comes
from `make triton-table`; `tests/kernels/triton/test_gate.py` has the limits. There are no times here: those need a GPU.

A launch is for a bucket of {decode} tokens (decode) or {prefill} (prefill); x and out have {width} features, {odd}
where widths are odd, and `rank` is the slots' largest. Wide loads: of the bytes that asynchronous copies bring (on AMD,
loads of rows and weights), those that come 16 at a time. Shared memory is in KiB."""
_BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
_GLOBAL_LOAD = re.compile(r"= load <(\d+) x (bfloat|half|i16|float)>, ptr addrspace\(1\)")
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Found:
    """One kernel, compiled. Sizes in bytes; wide_loads is the share of bytes that come 16 at a time, None for few."""

    target: str
    kernel: str
    case: str
    registers: int
    spilled: int
    shared: int
    wide_loads: float | None
    tensor_ops: int
    atomics: int


@dataclass(frozen=True)
class Case:
    """A site whose launches are compiled."""

    shape: str
    dtype: str
    rank: int
    kind: str = "linear"
    is_fast: bool = False

    @property
    def name(self) -> str:
        return " ".join([self.shape, self.dtype, f"rank {self.rank}", *([self.kind] if self.kind != "linear" else [])])


CASES = [
    *(
        Case(shape, dtype, rank, is_fast=(dtype, rank) == ("bf16", 16))
        for shape in BUCKETS
        for dtype in DTYPES
        for rank in (16, 64, 256)
    ),
    *(Case(shape, "bf16", 64, "slices") for shape in BUCKETS),
    Case("decode", "bf16", 64, "odd widths"),
    Case("prefill", "bf16", 64, "odd widths"),
    Case("decode", "bf16", 64, "embedding"),
    Case("prefill", "bf16", 64, "experts"),
]


def site_of(case: Case) -> Prepared:
    """The site's launches, as `prepare` makes them."""
    dtype, bucket = DTYPES[case.dtype], BUCKETS[case.shape]
    width = WIDTH - 5 if case.kind == "odd widths" else WIDTH
    experts = (EXPERTS,) if case.kind == "experts" else ()
    a_shape = (TOKENS, case.rank) if case.kind == "embedding" else (case.rank, width)
    parts = [
        SlicePart(
            torch.empty(SLOTS, *experts, *a_shape, dtype=dtype),
            torch.empty(SLOTS, *experts, case.rank, columns, dtype=dtype),
            torch.zeros(SLOTS * (experts or (1,))[0], dtype=torch.int32),
            torch.empty(SLOTS * (experts or (1,))[0]),
        )
        for columns in ((WIDTH, 1024, 1024) if case.kind == "slices" else (width,))
    ]
    columns = sum(part.out_features for part in parts)
    aux = torch.zeros(bucket, 1, dtype=torch.int32) if case.kind in ("embedding", "experts") else None
    x = None if case.kind == "embedding" else torch.empty(bucket, width, dtype=dtype)
    out, base = torch.empty(bucket, columns, dtype=dtype), torch.empty(bucket, columns, dtype=dtype)
    return prepare(BatchPlan.of_bucket(bucket, SLOTS, torch.device("cpu")), SiteCall(parts, out, x, base, aux))


def launches(
    cases: Sequence[Case],
) -> Iterator[tuple[str, str, Callable[..., None], tuple[object, ...], dict[str, object]]]:
    """kernel, case, function, arguments and constants of what is compiled; the plan's where a shape has cases."""
    for case in cases:
        site = site_of(case)
        if site.call.x is not None:
            yield "shrink", case.name, shrink, *site.shrink_launch
        yield "expand", case.name, expand, *site.expand_launch
    for shape, bucket in BUCKETS.items():
        if any(case.shape == shape for case in cases):
            plan = BatchPlan.of_bucket(bucket, SLOTS, torch.device("cpu"))
            for name, arguments, constants in plan.launches():
                yield name, shape, getattr(plan_module, name), arguments, constants


def compile_launch(
    function: Callable[..., None], arguments: tuple[object, ...], constants: dict[str, object], target: GPUTarget
) -> triton.compiler.CompiledKernel:
    """The kernel for the target, with the types and the divisibility of the arguments."""
    options = {name: value for name, value in constants.items() if name.startswith("num_")}
    values = {name: value for name, value in constants.items() if name not in options}
    if target.backend == "hip":  # what the host would choose there
        values |= {"PRECISION": "ieee"} if "PRECISION" in values else {}
        options["num_warps"] = max(options["num_warps"] * 32 // target.warp_size, 1)
    signature, attributes = {}, {}
    for index, (name, value) in enumerate(zip(function.arg_names, [*arguments, *values], strict=True)):
        if name in values:
            signature[name] = "constexpr"
            continue
        number = value.data_ptr() if isinstance(value, Tensor) else value
        signature[name] = _TYPES[value.dtype] if isinstance(value, Tensor) else "i32"
        if number % 16 == 0 and not function.params[index].do_not_specialize:
            attributes[index,] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(function, signature, values, attributes), target=target, options=options)


def measure(targets: Sequence[str], cases: Sequence[Case]) -> list[Found]:
    """What is compiled, read."""
    found = []
    for target in targets:
        for kernel, case, *launch in launches(cases):
            compiled = compile_launch(*launch, TARGETS[target])
            read = read_amd if target == "gfx942" else read_nvidia
            found.append(Found(target, kernel, case, **read(compiled)))
    return found


def read_nvidia(compiled: triton.compiler.CompiledKernel) -> dict[str, object]:
    """From the cubin, with the tools that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([_BINARIES / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources is not None, usage
    operations = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?([A-Z][A-Z0-9_.]+)", code, re.MULTILINE))
    loads = Counter[int]()
    for operation, count in operations.items():
        if operation.startswith("LDGSTS"):
            bits = re.search(r"\.(64|128)$", operation)
            size = int(bits[1]) // 8 if bits else 4
            loads[size] += count * size
        elif re.match(r"LDG.*\.[US]16$", operation):  # an element of its own: no index is of this size
            loads[2] += count * 2
    return {
        "registers": int(resources[1]),
        "spilled": int(resources[2]) + 4 * _count(operations, "LDL", "STL"),
        "shared": compiled.metadata.shared,
        "wide_loads": _share(loads),
        "tensor_ops": _count(operations, "HMMA", "HGMMA"),
        "atomics": _count(operations, "ATOM", "RED."),
    }


def read_amd(compiled: triton.compiler.CompiledKernel) -> dict[str, object]:
    """From the assembly and its notes; widths of loads from LLVM's code, which has types: i32 and i64 are indices.

    Scalar registers that spill go to lanes of vector registers, not to memory.
    """
    code = compiled.asm["amdgcn"]
    notes = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)$", code, re.MULTILINE)}
    operations = Counter(re.findall(r"^\s+([a-z][a-z0-9_]+)", code, re.MULTILINE))
    loads = Counter[int]()
    for count, item in re.findall(_GLOBAL_LOAD, compiled.asm["llir"]):
        size = int(count) * (4 if item == "float" else 2)
        loads[size] += size
    return {
        "registers": notes["vgpr_count"] + notes.get("agpr_count", 0),
        "spilled": notes["private_segment_fixed_size"] + 4 * notes["vgpr_spill_count"],
        "shared": compiled.metadata.shared,
        "wide_loads": _share(loads),
        "tensor_ops": _count(operations, "v_mfma"),
        "atomics": _count(operations, "global_atomic", "buffer_atomic", "flat_atomic"),
    }


def _count(operations: Counter[str], *prefixes: str) -> int:
    return sum(count for operation, count in operations.items() if operation.startswith(prefixes))


def _share(loads: Counter[int]) -> float | None:
    return loads[16] / loads.total() if loads else None


def page(found: list[Found]) -> str:
    """The table, for people."""
    lines = [PREFACE.format(version=triton.__version__, odd=WIDTH - 5, width=WIDTH, **BUCKETS)]
    for target in TARGETS:
        lines += ["", f"## {target}", ""]
        lines += ["| kernel | launch | registers | spilled | shared memory | wide loads | tensor-core instructions |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in found:
            if row.target == target:
                wide = "–" if row.wide_loads is None else f"{row.wide_loads:.0%}"
                shared = f"{row.shared / 1024:.3g}"
                cells = (row.kernel, row.case, row.registers, row.spilled, shared, wide, row.tensor_ops)
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a part of it, for Hopper")
    parser.add_argument("--target", action="append", choices=TARGETS, help="for this one only")
    parser.add_argument("--case", default="", help="only launches with this in their name")
    parser.add_argument("--json", action="store_true", help="print what was found, as JSON")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    targets = arguments.target or (["sm_90"] if arguments.fast else list(TARGETS))
    found = measure(targets, [case for case in CASES if case.is_fast >= arguments.fast and arguments.case in case.name])
    if arguments.write:
        PAGE.write_text(page(found), encoding="utf-8")
    print(json.dumps([asdict(row) for row in found]) if arguments.json else page(found))


if __name__ == "__main__":
    main()
