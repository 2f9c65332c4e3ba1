"""The wheel holds what it must and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {"slotcar", "slotcar_client", "slotcar_injector", "slotcar_kernels", "slotcar_sidecar"}
TYPED = {"slotcar/v1", "slotcar_client", "slotcar_kernels", "slotcar_sidecar"}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out), str(REPOSITORY)]
    subprocess.run(command, check=True, timeout=280)
    (path,) = out.glob("slotcar-*.whl")
    return zipfile.ZipFile(path)


def test_wheel_has_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_wheel_has_every_committed_module(wheel: zipfile.ZipFile) -> None:
    roots = [REPOSITORY / root for root in ("proto", "kernels", "sidecar", "clients", "deploy/injector")]
    wanted = {path.relative_to(root).as_posix() for root in roots for path in root.glob("slotcar*/**/*.py")}
    assert wanted - set(wheel.namelist()) == set()


def test_wheel_is_typed_and_licensed(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {f"{package}/py.typed" for package in TYPED} - names == set()
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_has_the_demo_adapters(wheel: zipfile.ZipFile) -> None:
    weights = [name for name in wheel.namelist() if name.endswith("/adapter_model.safetensors")]
    assert len(weights) == 3
    assert all(name.startswith("slotcar_sidecar/demo/") for name in weights)
    assert {name.replace("adapter_model.safetensors", "adapter_config.json") for name in weights} <= set(
        wheel.namelist()
    )
    assert all(wheel.getinfo(name).file_size <= 2_000_000 for name in weights)


def test_wheel_installs_the_command(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    assert "slotcar = slotcar_sidecar.cli:main" in wheel.read(entry_points).decode()
