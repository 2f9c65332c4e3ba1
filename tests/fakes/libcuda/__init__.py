"""A driver of CUDA over memory files, compiled once for each of its texts, and where its memory is for torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from slotcar_kernels.vmm import GpuMemory

__all__ = ["library", "on_host"]

_SOURCE = Path(__file__).with_name("driver.cpp")


def library() -> str:
    """The path of the compiled library."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"slotcar-fake-cuda-{os.getuid()}-{digest}.so"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        warnings = ("-Wall", "-Wextra", "-Werror")
        subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", *warnings, "-o", made, _SOURCE], check=True)
        made.replace(path)
    return str(path)


def on_host(memory: GpuMemory) -> torch.Tensor:
    """All bytes, as a tensor that keeps the memory; it is the CPU's."""
    there = (ctypes.c_char * memory.size_bytes).from_address(memory.address)
    there.memory = memory  # type: ignore[attr-defined]
    return torch.frombuffer(there, dtype=torch.uint8)
