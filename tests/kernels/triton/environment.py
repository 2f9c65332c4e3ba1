"""Where Triton is for these tests, and processes that have it.

`TRITON_INTERPRET` counts when a kernel is defined, and what reads out of bounds ends the process: so kernels run in
processes of their own. `make` puts each version into a folder of its own, .triton/VERSION, as torch for a GPU requires
one version, and torch for the CPU is not to see any.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / ".triton"
HERE = "tests/kernels/triton"
INTERPRETED = f"{HERE}/interpreted"
INSTALLED = "installed"  # stands for the Triton that this Python has without a folder


def versions() -> list[str]:
    """What there is, oldest first."""
    found = sorted(path.parent.name for path in FOLDER.glob("*/.installed"))
    return found or ([INSTALLED] if find_spec("triton") else [])


def version_or_skip() -> str:
    """The version that fast tests use: the oldest."""
    if not versions():
        pytest.skip("no triton here: make .triton/3.6.0/.installed")
    return versions()[0]


def run(
    version: str, *arguments: str, interpret: bool, path: Path | None = None, seconds: int = 1700
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` with this version of Triton, in the repository; `path` is before everything installed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TRITON_"))}
    before = environment.get("PYTHONPATH", "").split(os.pathsep)
    folder = "" if version == INSTALLED else str(FOLDER / version)
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path or ""), *before, folder])),
        "TRITON_CACHE_DIR": str(FOLDER / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def run_pytest(version: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A pytest of its own over tests of the interpreted kernels; a crash is a return code, and its trace is printed."""
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments)
    return run(version, *command, interpret=True, path=path)
