"""What tests/gpu runs on a GPU, in the interpreter: its batches, sides and bits are right before a GPU sees them."""

from __future__ import annotations

import pytest

from tests.kernels.triton.environment import run, version_or_skip
from tests.kernels.triton.test_interpreted import passed

COMMAND = ("-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".", "--confcutdir", "tests/gpu", "-q", "-x")
COMMAND += ("-p", "no:xdist", "-p", "tests.gpu.shares", "-W", "ignore", "tests/gpu", "-m", "not full")


def assert_passes(*arguments: str) -> None:
    done = run(version_or_skip(), *COMMAND, *arguments, interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout), done.stdout


def test_a_part_of_them() -> None:
    assert_passes("--share", "0/8")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_of_them() -> None:
    assert_passes()
