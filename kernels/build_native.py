"""Compiles slotcar_kernels/native/*.cpp into slotcar_kernels/_native.so: `python kernels/build_native.py`.

One library has a kernel per instruction set; each lies in a file of its own, which alone is compiled for it. Uses the
standard library only: the build hook of the wheel, the Makefile and the tests share it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).parent / "slotcar_kernels"
SOURCES = PACKAGE / "native"
LIBRARY = PACKAGE / "_native.so"

# Contraction would let the compiler choose where to round, and so make a row's bits depend on its tile.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra")
# GCC's own AVX-512 header trips these.
QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", *QUIET)
X86_FLAGS = {"avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": (*_AVX512, "-mavx512bf16")}


class CannotCompile(Exception):
    """There is no compiler, or it refuses the sources; the message is for people."""


def compile_library(target: Path, compiler: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
    """Writes the library to `target`, as a whole or not at all; `flags` come last. Raises CannotCompile."""
    compiler = compiler or system_compiler()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-") as folder:
        objects = Path(folder)
        x86 = _run([*compiler, "-dumpmachine"]).startswith("x86_64")
        sources = sorted(SOURCES.glob("*.cpp"))
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(lambda source: _compile(source, objects, x86, [*compiler, *FLAGS, *flags]), sources))
        linked = objects / "linked.so"
        _run([*compiler, "-shared", "-pthread", *flags, "-o", str(linked), *map(str, sorted(objects.glob("*.o")))])
        linked.replace(target)


def system_compiler() -> list[str]:
    """$CXX, or the system's c++. Raises CannotCompile when it is not there."""
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        raise CannotCompile(f"there is no compiler {command[0]}")
    return command


def _compile(source: Path, folder: Path, x86: bool, command: Sequence[str]) -> None:
    """One object file; a compiler too old for its instruction set leaves that out."""
    output = ["-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    try:
        _run([*command, *(X86_FLAGS.get(source.stem, ()) if x86 else ()), *output])
    except CannotCompile:
        if source.stem not in X86_FLAGS:
            raise
        _run([*command, *output])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")  # noqa: S603
    except OSError as error:
        raise CannotCompile(f"{command[0]}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise CannotCompile(f"{shlex.join(command)}\n{error.stderr}") from error
    sys.stderr.write(done.stderr)
    return done.stdout


if __name__ == "__main__":
    try:
        compile_library(LIBRARY)
    except CannotCompile as error:
        sys.exit(f"the native kernel is not built: {error}")
