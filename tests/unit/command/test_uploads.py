"""`slotcar load --upload` on a server whose disk does not take the bytes."""

from __future__ import annotations

from pathlib import Path

from tests.adapters import MINIMAL_CONFIG, raw_tensors, write_raw_adapter
from tests.server import SidecarProcess
from tests.unit.command.called import call


def test_a_person_is_told_that_the_bytes_are_in_memory_alone(tmp_path: Path) -> None:
    folder = write_raw_adapter(tmp_path / "sql", dict(MINIMAL_CONFIG), raw_tensors("proj"))
    disk = ("--disk", str(tmp_path / "disk"), "--disk-bytes", "1KiB")
    with SidecarProcess(tmp_path, tmp_path, extra=disk) as sidecar:
        result = call(sidecar, "load", "sql", str(folder), "--upload", "--tier", "host")
    assert result.exit_code == 0, result.output
    first, *_, last = result.stdout.splitlines()
    assert first.startswith("sql loaded: tier host")
    assert last.startswith("  warning: the disk tier did not take it: its bytes are in memory alone")
