"""`slotcar list --desired`, on a server that follows a file and on one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import slotcar_client
from slotcar_client.aio import connect

from tests.adapters import MINIMAL_CONFIG, raw_tensors, write_raw_adapter
from tests.server import SidecarProcess
from tests.unit.command.called import answer, call


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("declared")
    write_raw_adapter(folder / "sql", dict(MINIMAL_CONFIG), raw_tensors("proj"))
    path = folder / "adapters.yaml"
    path.write_text(
        f"apiVersion: slotcar.dev/v1\nadapters:\n- {{name: sql, source: {folder}/sql}}\n"
        f"- {{name: '[red]', source: /a}}\n- {{name: gone, source: {folder}/gone}}\n"
    )
    return path


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[SidecarProcess]:
    """Every entry of the file was tried."""
    folder = tmp_path_factory.mktemp("s")
    with SidecarProcess(folder, file.parent, extra=("--adapters", str(file))) as process:
        with slotcar_client.connect(process.target) as client, client.events() as events:
            while {each.state for each in client.desired().adapters} != {"ready", "failed", "invalid"}:
                next(events)
        yield process


def test_a_table_has_each_entry_and_why_it_is_not_there(sidecar: SidecarProcess, file: Path) -> None:
    header, *rows, last = call(sidecar, "list", "--desired").output.splitlines()
    assert header.split()[:4] == ["ADAPTER", "DESIRED", "TIER", "STATE"]
    assert [row.split()[0] for row in rows] == ["gone", "sql", "adapters[1]"]
    gone, sql, broken = rows
    assert "SOURCE_UNAVAILABLE: " in gone
    assert sql.split()[1:4] == ["present", "host", "ready"]
    assert "adapters[1].name is '[red]'" in broken
    assert last.startswith(f"{file}: 1 failed, 1 ready, 1 invalid; version sha256:")


def test_json_has_the_same(sidecar: SidecarProcess, file: Path) -> None:
    desired = answer(sidecar, "list", "--desired")
    assert desired["file"]["path"] == str(file)
    assert [(each["name"], each["state"]) for each in desired["adapters"]] == [
        ("gone", "failed"),
        ("sql", "ready"),
        ("", "invalid"),
    ]
    assert desired["adapters"][1]["next_try_seconds"] is None


async def test_the_asyncio_client_says_the_same(sidecar: SidecarProcess) -> None:
    async with connect(sidecar.target) as client:
        assert [each.name for each in (await client.desired()).adapters] == ["gone", "sql", ""]


def test_a_server_without_a_file_says_so(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, tmp_path) as sidecar:
        assert "follows no file" in call(sidecar, "list", "--desired").output
        assert answer(sidecar, "list", "--desired") == {"file": None, "adapters": []}
