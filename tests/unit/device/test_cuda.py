"""This folder's suite on the device of a GPU, over the CPU's memory, with its kernels in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.triton.environment import run, version_or_skip
from tests.kernels.triton.test_interpreted import passed

COMMAND = ("-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".", "--confcutdir", "tests/unit/device", "-q")
COMMAND += ("-x", "-p", "no:xdist", "-p", "tests.gpu.shares", "-W", "ignore")
SUITE = ("tests/unit/device/test_cpu_device.py", "tests/unit/device/test_kinds.py")


def assert_passes(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setenv("SLOTCAR_TEST_DEVICE", "cuda")
    done = run(version_or_skip(), *COMMAND, *SUITE, *arguments, interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout), done.stdout


def test_a_part_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_passes(monkeypatch, "--share", "0/8")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_passes(monkeypatch)
