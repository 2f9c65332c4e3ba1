"""The API on the wire: what is committed is what the .proto files say, and a change of the wire format is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import wire

REPOSITORY = Path(__file__).resolve().parents[2]
PROTO = REPOSITORY / "proto"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code and the reference as `make proto` would write them now."""
    out = tmp_path_factory.mktemp("proto")
    command = [sys.executable, str(PROTO / "generate.py"), "--code", str(out), "--reference", str(out / "api.md")]
    subprocess.run(command, check=True, timeout=120)
    return out


def _generated(root: Path) -> dict[str, str]:
    files = [path for pattern in ("*_pb2*.py", "*_pb2*.pyi") for path in (root / "slotcar").rglob(pattern)]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files}


def test_generated_code_is_fresh(fresh: Path) -> None:
    committed, wanted = _generated(PROTO), _generated(fresh)
    assert len(wanted) >= 16
    stale = sorted(name for name in committed.keys() | wanted.keys() if committed.get(name) != wanted.get(name))
    assert not stale, f"run make proto: {', '.join(stale)}"


def test_api_reference_is_fresh(fresh: Path) -> None:
    committed = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    assert committed == (fresh / "api.md").read_text(encoding="utf-8"), "run make proto: docs/api.md"


def test_buf_lint_is_clean() -> None:
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("buf is not in this environment")
    result = subprocess.run(
        [str(buf), "lint"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_wire_format_is_the_golden_one() -> None:
    """Names, numbers and types of slotcar.v1 change only on purpose: then run make golden and commit the result."""
    assert wire.describe() == wire.GOLDEN.read_text(encoding="utf-8"), "the wire format changed: see make golden"
