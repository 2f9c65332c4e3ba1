"""The direct plane of slots on a GPU, in a process with Triton's interpreter; and its weakenings, each caught there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.triton.environment import run_pytest, version_or_skip
from tests.kernels.triton.test_interpreted import passed
from tests.kernels.triton.test_mutants import weakened
from tests.mutants.catalogue import Mutant

DIRECT = "tests/planes/gpu/test_direct.py"
KERNELS = "kernels/slotcar_kernels"
TRANSPORTS = "clients/slotcar_client/transports"

MUTANTS = (
    Mutant(
        "the last check is made where the kernels are only launched",
        f"{KERNELS}/triton/units.py",
        "        self._event.wait()\n        self._guard.end()\n",
        "        self._guard.end()\n        self._event.wait()\n",
        f"{DIRECT}::test_a_slot_that_is_refilled_under_kernels_is_computed_again",
    ),
    Mutant(
        "there is no check once the kernels are complete",
        f"{KERNELS}/triton/units.py",
        "        self._guard.end()\n",
        "",
        f"{DIRECT}::test_so_is_one_that_was_sent_ahead",
    ),
    Mutant(
        "kernels are launched without a look at the slots",
        f"{KERNELS}/triton/units.py",
        "        batch.guard.begin(len(batch.slots))\n",
        "",
        f"{DIRECT}::test_nothing_is_launched_on_slots_that_changed_before",
    ),
    Mutant(
        "the first GPU is taken for the slots'",
        f"{KERNELS}/vmm.py",
        "if self.uuid(device) == uuid), None)",
        "if self.uuid(device)), None)",
        f"{DIRECT}::test_the_slots_gpu_is_found_whatever_its_number_or_refused",
    ),
    Mutant(
        "a connection that this side has ended is believed",
        f"{TRANSPORTS}/gpu_forwards.py",
        "        if self._slots.connection.ended:",
        "        if False:",
        f"{DIRECT}::test_a_result_of_a_connection_that_has_ended_is_none",
    ),
    Mutant(
        "memory is unmapped under kernels that read it",
        f"{KERNELS}/vmm.py",
        "    before()\n    unmap()\n",
        "    unmap()\n    before()\n",
        f"{DIRECT}::test_a_session_that_is_closed_under_its_kernels_waits_for_them",
    ),
)

pytestmark = pytest.mark.timeout(600)


def test_a_part_of_it() -> None:
    done = run_pytest(version_or_skip(), DIRECT, "-k", "refilled or ahead or forced or nothing or whatever")
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done.stdout), done.stdout


@pytest.mark.full
def test_all_of_it() -> None:
    done = run_pytest(version_or_skip(), "tests/planes/gpu")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    done = run_pytest(version_or_skip(), mutant.test, path=weakened(mutant, tmp_path))
    assert done.returncode == 1 or done.returncode < 0, f"{mutant.test} passes:\n{done.stdout}{done.stderr}"
    assert "FAILED" in done.stdout or "Segmentation fault" in done.stderr, done.stdout + done.stderr
    assert "ImportError" not in done.stdout, done.stdout
