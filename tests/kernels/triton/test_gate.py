"""Limits on what Triton's compiler makes of the kernels, for GPUs that are not here: see gate.py and its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.environment import run, version_or_skip, versions

Found = dict[str, Any]

# A thread's, of a multiprocessor's 65,536: room for three programs of 128 threads, or for one of 256 and a quarter.
REGISTERS = {"decode": 168, "prefill": 192}
NVIDIA_MOST, AMD_MOST = 255, 512
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
WIDE_LOADS = 0.9
ODD = "odd widths"  # where nothing is aligned: its loads are as narrow as they must be


def no_spills(row: Found) -> bool:
    return bool(row["spilled"] == 0)


def few_registers(row: Found) -> bool:
    most = AMD_MOST if row["target"] == "gfx942" else NVIDIA_MOST if ODD in row["case"] else REGISTERS[shape_of(row)]
    return bool(row["registers"] <= most)


def shared_memory_that_there_is(row: Found) -> bool:
    return bool(row["shared"] <= SHARED_BYTES[row["target"]])


def loads_of_16_bytes(row: Found) -> bool:
    if row["kernel"] not in ("shrink", "expand") or ODD in row["case"]:
        return True
    return row["wide_loads"] is not None and row["wide_loads"] >= WIDE_LOADS


def tensor_cores(row: Found) -> bool:
    return row["kernel"] not in ("shrink", "expand") or row["tensor_ops"] > 0


def no_atomics(row: Found) -> bool:
    return bool(row["atomics"] == 0)


LIMITS = (no_spills, few_registers, shared_memory_that_there_is, loads_of_16_bytes, tensor_cores, no_atomics)


def shape_of(row: Found) -> str:
    return str(row["case"]).split()[0]


def measured(version: str, *options: str, path: Path | None = None) -> list[Found]:
    """What the gate finds, in a process that has Triton."""
    done = run(version, "-m", "tests.kernels.triton.gate", "--json", *options, interpret=False, path=path)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[Found] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def fast_part() -> list[Found]:
    return measured(version_or_skip(), "--fast")


def assert_within(found: list[Found], limit: Callable[[Found], bool]) -> None:
    assert found
    beyond = [row for row in found if not limit(row)]
    assert not beyond, "\n".join(map(str, beyond))


@pytest.mark.parametrize("limit", LIMITS)
def test_the_fast_part(fast_part: list[Found], limit: Callable[[Found], bool]) -> None:
    assert_within(fast_part, limit)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", versions() or [pytest.param("none", marks=pytest.mark.skip("no triton here"))])
def test_everything(version: str) -> None:
    found = measured(version)
    assert {row["target"] for row in found} == set(SHARED_BYTES)
    for limit in LIMITS:
        assert_within(found, limit)


GOOD: Found = {
    "target": "sm_90",
    "kernel": "shrink",
    "case": "decode bf16 rank 16",
    "registers": 56,
    "spilled": 0,
    "shared": 16384,
    "wide_loads": 1.0,
    "tensor_ops": 8,
    "atomics": 0,
}


@pytest.mark.parametrize(
    ("limit", "bad"),
    [
        (no_spills, {"spilled": 4}),
        (few_registers, {"registers": 169}),
        (few_registers, {"case": "prefill bf16 rank 16", "registers": 193}),
        (shared_memory_that_there_is, {"shared": 228 * 1024}),
        (shared_memory_that_there_is, {"target": "sm_80", "shared": 164 * 1024}),
        (shared_memory_that_there_is, {"target": "gfx942", "shared": 65 * 1024}),
        (loads_of_16_bytes, {"wide_loads": 0.8}),
        (loads_of_16_bytes, {"wide_loads": None}),
        (tensor_cores, {"tensor_ops": 0}),
        (no_atomics, {"atomics": 1}),
    ],
)
def test_what_is_beyond_a_limit_is_found(limit: Callable[[Found], bool], bad: Found) -> None:
    assert_within([GOOD], limit)
    with pytest.raises(AssertionError):
        assert_within([GOOD, GOOD | bad], limit)
