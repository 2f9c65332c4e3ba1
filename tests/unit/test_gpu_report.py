"""What runs the checks of a GPU, without one: parts that fail alone, floors, targets, and the page that says so."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpu.__main__ import Part, parts, run
from tests.gpu.report import CASES, Case, Result, floor_us, median_us, table, target_us
from tests.waiting import eventually

RUN_SH = Path(__file__).resolve().parents[1] / "gpu" / "run.sh"
BANDWIDTH = 4e12
SMALL, MIDDLE, LARGE = Case(1, 1, 16), Case(32, 8, 64), Case(64, 64, 64)


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def ended(part: Part, logs: Path, seconds: float = 60) -> tuple[str, str]:
    done = run(part, logs, time.monotonic() + seconds)
    return done.result, done.why


def test_the_cases_are_those_of_the_targets() -> None:
    assert [(case.tokens, case.adapters, case.rank) for case in CASES] == [
        (tokens, adapters, rank) for tokens, adapters in ((1, 1), (32, 8), (64, 64), (256, 64)) for rank in (16, 64)
    ]
    assert {case.hidden for case in CASES} == {4096}


def test_bytes_and_floors() -> None:
    assert SMALL.weight_bytes == 16 * (4096 + 4096) * 2
    assert LARGE.moved_bytes == 64 * 64 * 8192 * 2 + 3 * 64 * 4096 * 2
    assert floor_us(LARGE, BANDWIDTH) == pytest.approx(LARGE.moved_bytes / 4e6)


@pytest.mark.parametrize(("case", "target"), [(SMALL, 5.0), (MIDDLE, 10.0 + 5.0), (LARGE, 13.0)])
def test_targets_are_absolute_up_to_where_bytes_count(case: Case, target: float) -> None:
    assert SMALL.weight_bytes < 2e6 < MIDDLE.weight_bytes < 60e6 < LARGE.weight_bytes
    assert target_us(case, floor=10.0) == pytest.approx(target)


def test_a_pair_is_its_share_of_the_median_replay() -> None:
    assert median_us([9.0, 80e-6, 40e-6], pairs=8) == pytest.approx(10.0)


def result(case: Case, errors: dict[str, str] | None = None, **us: float) -> dict[str, object]:
    return Result(case, 8, us, 2.5, BANDWIDTH, errors or {}).to_dict()


def test_the_page() -> None:
    results = [
        result(SMALL, slotcar=4.5, torch=30.0, atomics=9.0, plan=6.0),
        result(LARGE, {"torch": "RuntimeError: x"}, slotcar=99.0, atomics=100.0),
        result(MIDDLE, {"slotcar": "AssertionError: y"}, torch=3.0),
    ]
    found = [{"name": "racecheck", "result": "skipped", "seconds": 1.2, "why": "no\ntool | here"}]
    page = table({"GPU": "a | b"}, found, results)
    assert "| GPU | a \\| b |" in page
    assert "| racecheck | skipped | 1 | no tool \\| here |" in page
    small, large, middle = page.rstrip().splitlines()[-3:]
    assert small == "| 1/1 | 16 | 0.3 MB | 0.07 | 2.50 | 6.00 | 4.50 | ≤ 5.00 | met | 30.00 | 9.00 | 2.00 × | met |"
    assert large.endswith("| – | 99.00 | ≤ 22.32 | missed | – | 100.00 | 1.01 × | missed |")
    assert middle.endswith("| – | – | ≤ 7.29 | not measured | 3.00 | – | – | not measured |")
    columns = {line.count(" | ") for line in page.splitlines() if line.startswith("| 1/1") or "tokens/adapters" in line}
    assert len(columns) == 1
    assert "Nothing was measured." in table({}, [], [])


def test_a_part_fails_alone_and_says_why(tmp_path: Path) -> None:
    good, bad = command("print('7 passed')"), command("print('x'); raise SystemExit(3)")
    assert ended(Part("good", [good, good], 30), tmp_path) == ("passed", "7 passed")
    assert ended(Part("a/b", [good, bad], 30), tmp_path) == (
        "failed",
        "exit code 3, see a-b-1.log; 1 of 2 processes passed",
    )
    assert (tmp_path / "a-b-1.log").read_text() == "x\n"
    gone = ended(Part("gone", [("/there/is/no/such",)], 30), tmp_path)
    assert gone[0] == "failed"
    assert "/there/is/no/such" in gone[1]


def test_a_part_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"
    found = ended(Part("hangs", [command(code)], 2), tmp_path)
    assert found == ("failed", "it took too long; 0 of 1 processes passed")
    child = int((tmp_path / "hangs-0.log").read_text())
    state = Path(f"/proc/{child}/stat")
    # A signal to a group is with each of it before long, not at once.
    eventually(lambda: _has_ended(state), "the end of the child's child")


def _has_ended(state: Path) -> bool:
    try:
        return state.read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_part_is_skipped_with_its_reason(tmp_path: Path) -> None:
    part = Part("racecheck", [command("raise SystemExit(1)")], 30, why_not=lambda: "no tool here")
    assert ended(part, tmp_path) == ("skipped", "no tool here")
    assert ended(Part("late", [command("")], 30), tmp_path, seconds=-1) == ("failed", "no time was left")


def test_all_that_is_wanted_is_a_part(tmp_path: Path) -> None:
    names = [part.name for part in parts(tmp_path)]
    assert {"kernels", "device", "racecheck"} <= set(names)
    assert [name for name in names if name.startswith("times of")] == [f"times of {case.name}" for case in CASES]
    shares: Sequence[Sequence[str]] = next(part for part in parts(tmp_path) if part.name == "kernels").commands
    assert [share[-1] for share in shares] == [f"{number}/{len(shares)}" for number in range(len(shares))]


def test_the_script_is_one_that_bash_reads() -> None:
    assert subprocess.run(["bash", "-n", RUN_SH], check=False).returncode == 0
    assert RUN_SH.stat().st_mode & 0o111
