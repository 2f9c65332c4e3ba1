"""Runs every part of the checks of a GPU, each in processes of its own, and writes gpu.md and gpu.json.

    tests/gpu/run.sh [PART ...]        or, with PYTHONPATH set as it does, python -m tests.gpu [--out FOLDER] [PART ...]

A part that fails, crashes or takes too long is a line of the table, and the others run all the same. The exit code is 1
if one did, 0 if each passed or was skipped with a reason that is none of slotcar's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.report import CASES, table
from tests.gpu.sanitizer import RACECHECK, why_not

SECONDS = 470.0
"""For all parts together: those that are not begun by then fail for that."""

PROCESSES = max(2, min(os.cpu_count() or 2, 12))
# Of all folders above, no conftest.py is read: those need more than a machine with a GPU has.
PYTEST = ("-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".", "--confcutdir", "tests/unit/device", "-q")
KERNEL_TESTS = ("tests/gpu/test_kernels.py", "tests/gpu/test_determinism.py", "tests/gpu/test_sides.py")
DEVICE_TESTS = ("tests/gpu/test_device.py", "tests/unit/device/test_cpu_device.py", "tests/unit/device/test_kinds.py")
TAIL_LINES = 40
_TO_DASHES = str.maketrans({"/": "-", " ": "-", ",": None})  # in names of logs


@dataclass(frozen=True)
class Part:
    """Processes that run side by side; all must end with 0. `why_not` gives a reason to skip it, or nothing."""

    name: str
    commands: Sequence[Sequence[str]]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    why_not: Callable[[], str] | None = None


@dataclass(frozen=True)
class Done:
    """How a part ended: passed, failed or skipped."""

    name: str
    result: str
    seconds: float
    why: str


def parts(logs: Path) -> Iterator[Part]:
    python = sys.executable
    yield Part("first batches", [(python, "-m", "tests.gpu.race")], 60)
    yield Part("kernels", _shares(KERNEL_TESTS), 200)
    yield Part("device", _shares(DEVICE_TESTS), 150, {"SLOTCAR_TEST_DEVICE": "cuda"})
    yield Part("direct plane", [(python, *PYTEST, "tests/gpu/test_direct.py")], 90)
    checks = [(python, "-m", "tests.gpu.measure", str(number)) for number in range(len(CASES))]
    yield Part("sides", checks, 90)
    for number, case in enumerate(CASES):
        command = (python, "-m", "tests.gpu.measure", str(number), str(logs / f"case-{number}.json"))
        yield Part(f"times of {case.name}", [command], 60)
    yield Part("racecheck", [(*RACECHECK, "-m", "tests.gpu.race")], 90, why_not=why_not)


def _shares(tests: Sequence[str]) -> list[Sequence[str]]:
    """Processes that run the tests together."""
    command = (sys.executable, *PYTEST, "-p", "tests.gpu.shares", *tests, "--share")
    return [(*command, f"{number}/{PROCESSES}") for number in range(PROCESSES)]


def run(part: Part, logs: Path, deadline: float) -> Done:
    """Runs a part until its time is over; its output is in a log for each of its processes."""
    start = time.monotonic()
    if start >= deadline:
        return Done(part.name, "failed", 0, "no time was left")
    reason = part.why_not() if part.why_not is not None else ""
    if reason:
        return Done(part.name, "skipped", time.monotonic() - start, reason)
    names = [logs / f"{part.name.translate(_TO_DASHES)}-{index}.log" for index in range(len(part.commands))]
    end = min(start + part.seconds, deadline)
    try:
        running = [_begin(command, part.environment, log) for command, log in zip(part.commands, names, strict=True)]
    except OSError as error:
        return Done(part.name, "failed", time.monotonic() - start, str(error))
    codes = [_code(process, end) for process in running]
    bad = [(log, code) for log, code in zip(names, codes, strict=True) if code != 0]
    for log, code in bad:
        print(f"--- {log}, exit code {code}", *log.read_text(errors="replace").splitlines()[-TAIL_LINES:], sep="\n")
    took = time.monotonic() - start
    if not bad:
        return Done(part.name, "passed", took, _last_lines(names))
    log, code = bad[0]
    why = "it took too long" if code is None else f"exit code {code}, see {log.name}"
    return Done(part.name, "failed", took, f"{why}; {len(codes) - len(bad)} of {len(codes)} processes passed")


def _begin(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        variables = {**os.environ, **environment}
        return subprocess.Popen(command, stdout=out, stderr=out, env=variables, start_new_session=True)


def _code(process: subprocess.Popen[bytes], end: float) -> int | None:
    """The exit code, or None of one that was ended because its time was over."""
    try:
        return process.wait(max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _last_lines(logs: Sequence[Path]) -> str:
    """What the processes say at their end; for people."""
    lines = [log.read_text(errors="replace").rstrip().rpartition("\n")[2] for log in logs]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def _facts() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.facts"], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"missing": done.stderr.rstrip().rpartition("\n")[2]}
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _results(logs: Path) -> list[dict[str, Any]]:
    files = [logs / f"case-{number}.json" for number in range(len(CASES))]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/measurements"), help="folder of gpu.md and gpu.json")
    parser.add_argument("--logs", type=Path, default=Path("build/gpu"), help="folder of the parts' output")
    parser.add_argument("parts", nargs="*", help="only parts whose names begin so")
    arguments = parser.parse_args()
    deadline = time.monotonic() + SECONDS
    for folder in (arguments.out, arguments.logs):
        folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(CASES)):
        (arguments.logs / f"case-{number}.json").unlink(missing_ok=True)
    facts = _facts()
    if "missing" in facts:
        print(f"nothing can run here: there is no {facts['missing']}", file=sys.stderr)
        return 1
    done: list[Done] = []
    for part in parts(arguments.logs):
        if arguments.parts and not part.name.startswith(tuple(arguments.parts)):
            continue
        done.append(run(part, arguments.logs, deadline))
        print(f"{done[-1].result}: {part.name} in {done[-1].seconds:.0f} s: {done[-1].why}")
        ended, results = [vars(each) for each in done], _results(arguments.logs)
        found = {"facts": facts, "parts": ended, "results": results}
        (arguments.out / "gpu.json").write_text(json.dumps(found, indent=2) + "\n")
        (arguments.out / "gpu.md").write_text(table(facts, ended, results))
    return int(not done or any(each.result == "failed" for each in done))


if __name__ == "__main__":
    sys.exit(main())
