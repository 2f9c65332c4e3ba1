"""What each verb does and prints, and its exit code."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from slotcar_sidecar.command import tables
from slotcar_sidecar.config import Config

from tests.server import SidecarProcess
from tests.unit.command.called import answer, call, invoke


def test_every_verb_as_a_script_uses_it(sidecar: SidecarProcess) -> None:
    source = str(sidecar.root / "sql")
    assert answer(sidecar, "estimate", source)["fits"]
    report = answer(sidecar, "load", "sql", source, "--keep")
    assert report["sites_matched"] == [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert answer(sidecar, "load", "sql", f"file://{source}", "--digest", report["digest"])["already_resident"]
    assert answer(sidecar, "show", "sql")["keep"]
    assert not answer(sidecar, "release", "sql")["keep"]
    assert answer(sidecar, "keep", "sql")["keep"]
    (near,) = answer(sidecar, "prefetch", "sql", "--tier", "host")
    assert (near["adapter"]["tier"], near["why_not"]) == ("device", "")
    listed = answer(sidecar, "list")
    assert [adapter["name"] for adapter in listed["adapters"]] == ["sql"]
    assert len(listed["layout"]["slots"]) == 2
    assert answer(sidecar, "unload", "sql", "--force")["digest"] == report["digest"]


def test_every_verb_as_a_person_reads_it(sidecar: SidecarProcess) -> None:
    source = str(sidecar.root / "sql")
    for arguments, words in (
        (("estimate", source), ("fits", "rank 4")),
        (("load", "sql", source), ("sql loaded", "2 sites with weights")),
        (("load", "sql", source), ("is there already",)),
        (("show", "sql"), ("sha256:", "self_attn.q_proj")),
        (("prefetch", "sql"), ("sql", "device")),
        (("list",), ("NAME", "sql", "1 occupied")),
        (("unload", "sql"), ("its slot is free",)),
    ):
        result = call(sidecar, *arguments)
        assert result.exit_code == 0, result.output
        for word in words:
            assert word in result.output


def test_what_a_prefetch_cannot_bring_nearer_is_1_with_all_that_it_did(sidecar: SidecarProcess) -> None:
    assert answer(sidecar, "load", "sql", str(sidecar.root / "sql"), "--tier", "host")["adapter"]["tier"] == "host"
    result = call(sidecar, "prefetch", "nobody", "sql")
    assert result.exit_code == 1
    assert "ADAPTER_NOT_FOUND" in result.output
    assert answer(sidecar, "show", "sql")["tier"] == "device"
    refused = call(sidecar, "prefetch", "sql", "--tier", "disk")
    assert refused.exit_code == 1
    assert "REQUEST_INVALID" in refused.stderr
    assert call(sidecar, "unload", "sql").exit_code == 0


def test_a_refusal_is_1_with_its_reason_and_facts(sidecar: SidecarProcess) -> None:
    result = call(sidecar, "show", "nobody")
    assert result.exit_code == 1
    assert "ADAPTER_NOT_FOUND" in result.stderr
    assert "adapters: nobody" in result.stderr
    refused = call(sidecar, "load", "x", "/etc", "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["error"]["reason"] == "SOURCE_DENIED"


def test_brackets_and_colons_are_printed_as_they_are(sidecar: SidecarProcess) -> None:
    result = call(sidecar, "estimate", "/nope/[/b]:smile:")
    assert result.exit_code == 1
    assert "/nope/[/b]:smile:" in result.stderr
    loaded = answer(sidecar, "load", "brackets", str(sidecar.root / "[red]x"))
    assert loaded["adapter"]["source"].endswith("[red]x")
    assert call(sidecar, "unload", "brackets").exit_code == 0


@pytest.mark.parametrize(
    "arguments", [("show",), ("load",), ("frobnicate",), ("list", "--target", "http://x"), ("list", "--nonsense")]
)
def test_wrong_usage_is_2(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_a_server_that_is_away_is_1(tmp_path: Path) -> None:
    result = invoke("list", "--target", f"unix://{tmp_path}/nobody.sock")
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.stderr


def test_spec_prints_what_serve_reads(sidecar: SidecarProcess, served: list[Config], tmp_path: Path) -> None:
    result = invoke("spec", "--from", str(sidecar.root / "model"))
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["sites"]) == 15
    assert invoke("spec", "--from", str(tmp_path)).exit_code == 1
    assert invoke("spec", "--from", "/nowhere").exit_code == 2


def test_doctor_says_what_is_there(sidecar: SidecarProcess) -> None:
    checks = {check["what"]: check for check in answer(sidecar, "doctor")}
    assert checks["torch"]["state"] == "ok"
    assert "2 slots" in checks["sidecar"]["found"]
    assert (checks["ring plane"]["state"], checks["direct plane"]["state"]) == ("ok", "ok")
    lonely = {check["what"]: check for check in json.loads(invoke("doctor", "--json", "--target", "unix:///x").stdout)}
    assert lonely["sidecar"]["state"] == "note"


# Sessions, capacity, uploads


def test_a_load_stops_in_memory_or_sends_a_folder(sidecar: SidecarProcess, tmp_path: Path) -> None:
    assert answer(sidecar, "load", "sql", str(sidecar.root / "sql"), "--tier", "host")["adapter"]["tier"] == "host"
    assert "tier host" in call(sidecar, "load", "sql", "--tier", "host").output
    elsewhere = shutil.copytree(sidecar.root / "sql", tmp_path / "elsewhere")
    assert call(sidecar, "load", "sent", str(elsewhere)).exit_code == 1
    sent = answer(sidecar, "load", "sent", str(elsewhere), "--upload")
    assert sent["digest"] == answer(sidecar, "show", "sql")["digest"]
    assert call(sidecar, "load", "sent", "--upload").exit_code == 2
    assert call(sidecar, "load", "sent", str(tmp_path), "--upload").exit_code == 1
    assert call(sidecar, "load", "sql", "--tier", "tape").exit_code == 2
    for name in ("sql", "sent"):
        assert call(sidecar, "unload", name).exit_code == 0


# Events and watch, as processes: they end by signals, and by what happens to a pipe or a server


def test_human_seconds() -> None:
    assert [tables.human_seconds(n) for n in (0.4, 59, 60, 90, 3600, 7320)] == [
        "0 s", "59 s", "1 min 0 s", "1 min 30 s", "1 h 0 min", "2 h 2 min",
    ]  # fmt: skip


def test_human_bytes() -> None:
    assert [tables.human_bytes(n) for n in (0, 1023, 1536, 5 << 20, 1 << 45)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "32.0 TiB",
    ]  # fmt: skip


def test_the_version_is_the_distributions() -> None:
    assert version("slotcar") in invoke("--version").output
