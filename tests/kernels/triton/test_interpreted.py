"""The kernels in Triton's interpreter against float64: a process for the fast part, and one per version for all."""

from __future__ import annotations

import re

import pytest

from tests.kernels.triton.environment import INTERPRETED, run_pytest, version_or_skip, versions

LEAST_CASES = 60


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def test_the_fast_part() -> None:
    done = run_pytest(version_or_skip(), INTERPRETED, "-m", "not full")
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout), done.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", versions() or [pytest.param("none", marks=pytest.mark.skip("no triton here"))])
def test_everything(version: str) -> None:
    done = run_pytest(version, INTERPRETED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout) >= LEAST_CASES, done.stdout
    assert "skipped" not in done.stdout, done.stdout
