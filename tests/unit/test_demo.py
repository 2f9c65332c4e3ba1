"""`slotcar demo` runs to its end and says what it must, on the tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run_demo(*options: str) -> str:
    command = [sys.executable, "-m", "slotcar_sidecar", "demo", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_story_is_told_and_every_token_checked(tmp_path: Path) -> None:
    story = run_demo("--tiny", "--cache", str(tmp_path))
    for line in (
        "slot taken by numbered",
        "SLOTS_EXHAUSTED",
        "unload capitals --force",
        "LAYOUT_STALE",
        "Nobody was ever served with somebody else's weights.",
    ):
        assert line in story
    assert story.count("equal the undisturbed run's") == 4


@pytest.mark.full
@pytest.mark.smollm2
def test_the_story_on_smollm2(tmp_path: Path) -> None:
    story = run_demo("--cache", str(tmp_path))
    assert story.count("equal the undisturbed run's") == 4
