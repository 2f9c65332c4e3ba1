"""Building the compiled kernel: with sanitizers, for another processor, and not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ARM = "aarch64-linux-gnu-g++"

RUN_WITH_LIBRARY = """
import sys
from pathlib import Path
import pytest
from slotcar_kernels import native
native._LIBRARY = Path(sys.argv[1])
assert native.available(), native.backend()
"""
RUN_TESTS = "sys.exit(pytest.main(sys.argv[2:]))"
READ_TOO_MUCH = """
from array import array
import torch
from slotcar_kernels import plan, sites
site = sites.SiteSlots(torch.zeros(1, 1, 4096), torch.zeros(1, 1, 8), [1], [1.0])
call, rows = native.PreparedCall(torch.float32, [site], ("portable", 1)), native.NativePlan(plan.plan_rows([(0, 1)]))
ranks, scales, x, out = array("q", [1]), array("f", [1]), torch.zeros(1, 4000), torch.zeros(1, 8)
call.use(rows, [native.address(ranks)], [native.address(scales)])
call.point(x, [out], [None])
call.run()
"""


@pytest.fixture
def build_native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "kernels"))
    import build_native

    return build_native


def test_without_a_compiler_the_reason_is_told(
    build_native: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    with pytest.raises(build_native.CannotCompile, match="there is no compiler no-such-compiler"):
        build_native.compile_library(tmp_path / "_native.so")


def test_a_compiler_that_fails_leaves_nothing_and_is_quoted(build_native: ModuleType, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(build_native.CannotCompile, match="out of ideas"):
        build_native.compile_library(folder / "_native.so", [str(compiler)])
    assert list(folder.iterdir()) == []


@pytest.fixture
def compiler(build_native: ModuleType) -> list[str]:
    try:
        return build_native.system_compiler()
    except build_native.CannotCompile as error:
        pytest.skip(str(error))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_sanitizers_find_nothing_in_the_sweeps(build_native: ModuleType, compiler: list[str], tmp_path: Path) -> None:
    library = tmp_path / "_native.so"
    build_native.compile_library(library, compiler, SANITIZERS)
    environment = sanitized(compiler)
    planted = python([RUN_WITH_LIBRARY + READ_TOO_MUCH, str(library)], environment)
    assert "heap-buffer-overflow" in planted.stderr, planted.stderr[-2000:]
    sweeps = ["test_cpu.py", "test_fill.py", "test_native.py"]
    tests = [*(f"tests/kernels/{name}" for name in sweeps), "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    found = python([RUN_WITH_LIBRARY + RUN_TESTS, str(library), *tests, "-k", "not torch- and not newer"], environment)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]


def sanitized(compiler: Sequence[str]) -> dict[str, str]:
    """An environment in which Python can load a library with sanitizers; what Python itself leaks is no matter."""
    runtimes = [
        subprocess.run([*compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(path.strip()).is_absolute() for path in runtimes):
        pytest.skip("the compiler has no shared sanitizer runtimes")
    preload = " ".join(path.strip() for path in runtimes)
    return {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": str(REPOSITORY)}


def python(arguments: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(
        command, check=False, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=800
    )


@pytest.mark.full
def test_aarch64_compiles_and_computes(build_native: ModuleType, tmp_path: Path) -> None:
    if shutil.which(ARM) is None:
        pytest.skip(f"there is no {ARM}: run make apt-full")
    build_native.compile_library(tmp_path / "_native.so", [ARM], ["-Werror"])
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("it compiles; there is no qemu-aarch64 to run it: run make apt-full")
    program = tmp_path / "selfcheck"
    sources = [str(path) for path in (REPOSITORY / "tests/kernels/selfcheck.cpp", *build_native.SOURCES.glob("*.cpp"))]
    flags = [*build_native.FLAGS, "-static", "-I", str(build_native.SOURCES)]
    subprocess.run([ARM, *flags, *sources, "-o", str(program)], check=True, timeout=200)
    found = subprocess.run([emulator, str(program)], check=False, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stdout


WHEELS = [
    ({}, "linux_", True, ""),
    ({"SLOTCAR_NO_NATIVE": "1"}, "py3-none-any", False, "SLOTCAR_NO_NATIVE"),
    ({"CXX": "no-such-compiler"}, "py3-none-any", False, "there is no compiler no-such-compiler"),
]


@pytest.mark.full
@pytest.mark.parametrize(("environment", "tag", "has_library", "message"), WHEELS, ids=["built", "pure", "no compiler"])
def test_a_wheel_is_built_in_any_case(
    environment: dict[str, str], tag: str, has_library: bool, message: str, compiler: list[str], tmp_path: Path
) -> None:
    before = library_times()
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--wheel-dir", str(tmp_path), str(REPOSITORY)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, text=True, timeout=280
    )
    (wheel,) = tmp_path.glob("slotcar-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert tag in wheel.name
    assert ("slotcar_kernels/_native.so" in names) == has_library
    assert not any(name.startswith("slotcar_kernels/native/") for name in names)
    assert message in done.stdout + done.stderr
    assert library_times() == before, "building a wheel has touched the checkout's library"


def library_times() -> list[int]:
    return [path.stat().st_mtime_ns for path in (REPOSITORY / "kernels/slotcar_kernels").glob("_native.so")]
