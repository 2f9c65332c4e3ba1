"""Weakenings of the GPU kernels by a line, each caught by the test that it names, which passes without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kernels.triton.environment import INTERPRETED, REPOSITORY, run_pytest, version_or_skip
from tests.kernels.triton.test_gate import measured, no_atomics
from tests.mutants.catalogue import Mutant

KERNELS = "kernels/slotcar_kernels/triton"
LINEAR = f"{INTERPRETED}/test_linear.py"
OFFSETS = f"{INTERPRETED}/test_offsets.py"

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

ATOMICS = Mutant(
    "planes are summed by atomics",
    f"{KERNELS}/shrink.py",
    "tl.store(planes + position[:, None] * RANK + r[None, :], inner, stored)",
    "tl.atomic_add(planes + position[:, None] * RANK + r[None, :], inner, mask=stored)",
    f"{LINEAR}::test_what_was_prepared_once_serves_every_batch",
)

MUTANTS = (
    ATOMICS,
    Mutant(
        "B is read above the slot's rank",
        f"{KERNELS}/expand.py",
        "(r < rank)[:, None] & inside[None, :]",
        "(r < RANK)[:, None] & inside[None, :]",
        f"{LINEAR}::test_decode",
    ),
    Mutant(
        "A is read above the slot's rank",
        f"{KERNELS}/shrink.py",
        "(r < rank)[:, None] & inside[None, :]",
        "(r < RANK)[:, None] & inside[None, :]",
        f"{LINEAR}::test_what_the_shrink_leaves_above_a_rank_is_zero",
    ),
    Mutant(
        "planes are read above what was written",
        f"{KERNELS}/expand.py",
        "    return tl.where((r < rank)[None, :], inner, 0.0)\n",
        "    return inner\n",
        f"{INTERPRETED}/test_by_aux.py::test_embeddings",
    ),
    Mutant(
        "offsets of rows of x have 32 bits",
        f"{KERNELS}/shrink.py",
        "other=0).to(tl.int64)\n",
        "other=0)\n",
        f"{OFFSETS}::test_far_apart[x]",
    ),
    Mutant(
        "offsets of rows of out have 32 bits",
        f"{KERNELS}/expand.py",
        "row = tl.load(order + position, live, other=0).to(tl.int64)",
        "row = tl.load(order + position, live, other=0)",
        f"{OFFSETS}::test_far_apart[out]",
    ),
    Mutant(
        "offsets of slots have 32 bits",
        f"{KERNELS}/slices.py",
        "    return address + start\n",
        "    return address + start.to(tl.int32)\n",
        f"{OFFSETS}::test_far_apart[b]",
    ),
    Mutant(
        "rows behind a tile's last are computed",
        f"{KERNELS}/expand.py",
        "live = tl.arange(0, ROWS) < tl.load(tiles + tile * 4 + 2)",
        "live = tl.arange(0, ROWS) < ROWS",
        f"{LINEAR}::test_decode",
    ),
    Mutant(
        "BASE rows are rounded through the sum",
        f"{KERNELS}/expand.py",
        "tl.store(out_at, tl.load(base_at, stored), stored)",
        "tl.store(out_at, tl.load(base_at, stored) + 0.0, stored)",
        f"{LINEAR}::test_rows_without_a_delta_keep_their_bits",
    ),
    Mutant(
        "a fault does not stop the launches",
        f"{KERNELS}/plan.py",
        "tl.store(counts, tl.where(bad > 0, 0, every - of_base))",
        "tl.store(counts, every - of_base)",
        f"{INTERPRETED}/test_plan.py::test_a_slot_that_there_is_not_leaves_nothing_to_do",
    ),
    Mutant(
        "ids are believed after their check",
        f"{KERNELS}/expand.py",
        "live = (token >= 0) & (token < TOKENS)",
        "live = token > -2",
        f"{INTERPRETED}/test_by_aux.py::test_an_id_that_changes_after_its_check_reads_nothing",
    ),
    Mutant(
        "rows of one key share a position",
        f"{KERNELS}/plan.py",
        "position = smaller + before",
        "position = smaller",
        f"{INTERPRETED}/test_plan.py::test_experts_are_keys_of_their_own",
    ),
)


def weakened(mutant: Mutant, folder: Path) -> Path:
    """A copy of the package with the weakening, to stand first on the path."""
    root, package, *rest = Path(mutant.file).parts
    shutil.copytree(REPOSITORY / root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder.joinpath(package, *rest)
    file.write_text(mutant.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def test_the_named_tests_pass_as_the_code_is() -> None:
    done = run_pytest(version_or_skip(), *sorted({mutant.test for mutant in MUTANTS}), "-m", "not full")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    """By a failed test, or by the end of its process, which reads or writes where there is nothing."""
    done = run_pytest(version_or_skip(), mutant.test, "-m", "not full", path=weakened(mutant, tmp_path))
    assert done.returncode == 1 or done.returncode < 0, f"{mutant.test} passes:\n{done.stdout}{done.stderr}"
    assert "FAILED" in done.stdout or "Fatal Python error" in done.stderr, done.stdout + done.stderr
    assert "ImportError" not in done.stdout, done.stdout
    assert "CompilationError" not in done.stdout, done.stdout


def test_the_gate_sees_atomics(tmp_path: Path) -> None:
    found = measured(version_or_skip(), "--fast", path=weakened(ATOMICS, tmp_path))
    assert not all(map(no_atomics, found))
