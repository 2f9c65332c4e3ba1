"""A wheel, built with and without a compiler, installs into an empty environment and serves the demo from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from slotcar_kernels import native

REPOSITORY = Path(__file__).resolve().parents[2]
CONSTRAINTS = REPOSITORY / "constraints" / "dev.txt"
NO_COMPILER = {"CXX": "no-such-compiler"}

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

# The metric that says which kernel runs, as a server of this environment would show it.
BUILD_INFO = """
from prometheus_client import generate_latest
from slotcar_sidecar.device.cpu import CpuDevice
from slotcar_sidecar.ops.metrics import Metrics
metrics = Metrics()
metrics.build(version="1", epoch="e", device="cpu", slot_dtype="float32", kernel=CpuDevice.kernel)
print(generate_latest(metrics.registry).decode())
"""


def run(command: Sequence[str | Path], cwd: Path, more: Mapping[str, str] | None = None) -> str:
    """What the command prints. Nothing of the checkout and of its environment can be imported from there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"PIP_CONSTRAINT": str(CONSTRAINTS), "HF_HUB_OFFLINE": "1"} | dict(more or {}),
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module", params=[{}, NO_COMPILER], ids=["with a compiler", "without one"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """The programs of an environment into which a wheel was installed, and whether no compiler had built it."""
    if request.param is not NO_COMPILER and shutil.which("c++") is None:
        pytest.skip("there is no compiler: run make apt")
    folder = tmp_path_factory.mktemp("installed")
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip"]
    run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, REPOSITORY], folder, request.param)
    (wheel,) = wheels.glob("slotcar-*.whl")
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    run([programs / "pip", "install", "-c", CONSTRAINTS, f"{wheel}[demo]"], folder)
    return programs, request.param is NO_COMPILER


def test_it_says_which_kernel_runs(installed: tuple[Path, bool], tmp_path: Path) -> None:
    programs, pure = installed
    doctor = run([programs / "slotcar", "doctor"], tmp_path)
    (line,) = [line for line in doctor.splitlines() if "kernel: " in line]
    expected = "kernel: torch: this installation has no compiled kernel" if pure else f"kernel: {native.best_isa()}"
    assert expected in line
    metrics = run([programs / "python", "-c", BUILD_INFO], tmp_path)
    assert f'kernel="{"torch" if pure else native.best_isa()}"' in metrics


def test_the_demo_runs(installed: tuple[Path, bool], tmp_path: Path) -> None:
    programs, _ = installed
    said = run([programs / "slotcar", "demo", "--tiny", "--cache", tmp_path / "cache"], tmp_path)
    assert "Nobody was ever served with somebody else's weights." in said


def test_it_comes_from_the_environment(installed: tuple[Path, bool], tmp_path: Path) -> None:
    programs, _ = installed
    where = run([programs / "python", "-c", "import slotcar_kernels as s; print(s.__file__)"], tmp_path)
    assert where.startswith(str(programs.parent))
