"""Debian's Prometheus and promtool; where they are missing, their tests are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

Promtool = Callable[..., str]


def _installed(name: str) -> str:
    binary = shutil.which(name)
    if binary is None:
        pytest.skip(f"{name} is missing: `make apt` installs it, from Debian's package prometheus")
    return binary


@pytest.fixture(scope="session")
def prometheus_binary() -> str:
    return _installed("prometheus")


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Runs promtool in the repository, and gives what it says; it must have nothing to complain of."""
    binary = _installed("promtool")

    def run(*words: str, stdin: str = "") -> str:
        done = subprocess.run(
            [binary, *words], input=stdin, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
