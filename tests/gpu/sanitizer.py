"""Whether compute-sanitizer runs on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys

__all__ = ["RACECHECK", "why_not"]

RACECHECK = ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9", sys.executable)
"""Before what Python is to run."""

TOUCH = "import torch; torch.zeros(1, device='cuda').item()"


def why_not() -> str:
    """Why it does not, or nothing: it is tried on a program that only touches the GPU."""
    if shutil.which("compute-sanitizer") is None:
        return "no compute-sanitizer here"
    command = [*RACECHECK, "-c", TOUCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "compute-sanitizer does not come to an end here"
    return "" if done.returncode == 0 else f"compute-sanitizer is refused here: {_last(done.stdout + done.stderr)}"


def _last(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]
