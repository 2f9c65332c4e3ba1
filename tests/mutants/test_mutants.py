"""Every weakening in the catalogue is caught by the test that it names, which passes without it.

The file is changed in a copy of its import package that stands first on the path of a pytest of its own; the working
tree stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS, Mutant

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_SECONDS = 120


def run(test: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The named test in a process of its own, with `path` before everything installed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS, check=False
    )


def test_the_named_tests_pass_as_the_code_is() -> None:
    """All of them in one run: a test that fails by itself would catch anything."""
    tests = sorted({mutant.test for mutant in MUTANTS})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=MAX_SECONDS, check=False)
    assert done.returncode == 0, done.stdout


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    root, package, *rest = Path(mutant.file).parts
    shutil.copytree(REPOSITORY / root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path.joinpath(package, *rest)
    file.write_text(mutant.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
    done = run(mutant.test, tmp_path)
    assert done.returncode == 1, f"{mutant.test} passes with the mutant {mutant.name!r}:\n{done.stdout}"
    assert "FAILED" in done.stdout, done.stdout
    assert "ImportError" not in done.stdout, done.stdout
