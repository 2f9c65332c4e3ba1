"""The verbs for the server itself, with a real one: its end, its log, and a bundle for whoever helps."""

from __future__ import annotations

import json
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import slotcar_client
from slotcar_client import SlotcarError, aio
from slotcar_client.aio import AsyncClient
from slotcar_sidecar.command import bundle, snapshot
from slotcar_sidecar.command.bundle import LEFT_OUT, Missing

from tests.adapters import MINIMAL_CONFIG, WEIGHTS_FILE, raw_tensors, write_raw_adapter
from tests.server import STOP_SECONDS, SidecarProcess
from tests.unit.command.called import answer, call, invoke

PARTS = (
    *("server.json", "capacity.json", "layout.json", "adapters.json", "sessions.json", "events.json", "desired.json"),
    *("metrics.txt", "doctor.json", "versions.json", "machine.json"),
)
ASKED = PARTS[:8]
TOKEN, PASSWORD, VARIABLE = "hf_plantedplantedplanted", "planted-password", "planted-variable"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_raw_adapter(tmp_path / "root" / "sql", dict(MINIMAL_CONFIG), raw_tensors("layers.0.q_proj", seed=1))
    return tmp_path / "root"


@pytest.fixture
def sidecar(start_sidecar: Callable[..., SidecarProcess], root: Path, tmp_path: Path) -> SidecarProcess:
    """With credentials in every place that can have some."""
    options = tmp_path / "options.json"
    options.write_text(
        json.dumps({"s3://bucket": {"key": {"env": "PLANTED"}, "secret": {"file": str(tmp_path / "key")}}})
    )
    (tmp_path / "key").write_text(PASSWORD)
    extra = ("--metrics", "127.0.0.1:0", "--source-options", str(options), "--source", "s3://bucket")
    return start_sidecar(root, extra=extra, environment={"PLANTED": VARIABLE, "HF_TOKEN": TOKEN})


# The log and the end


def test_the_level_of_the_log_is_shown_and_changed(sidecar: SidecarProcess) -> None:
    assert call(sidecar, "log-level").output == "info\n"
    assert call(sidecar, "log-level", "debug").output == "debug, info before\n"
    assert answer(sidecar, "log-level", "error") == {"level": "error", "previous": "debug"}
    assert call(sidecar, "log-level", "loud").exit_code == 2
    assert answer(sidecar, "log-level")["level"] == "error"


def test_shutdown_waits_until_the_server_is_gone(sidecar: SidecarProcess) -> None:
    assert sidecar.process is not None
    result = call(sidecar, "shutdown", "--deadline", "1.5", "--wait")
    assert (result.exit_code, "it is gone" in result.output) == (0, True), result.output
    assert sidecar.process.wait(STOP_SECONDS) == 0
    again = call(sidecar, "shutdown")
    assert (again.exit_code, "UNAVAILABLE" in again.stderr) == (1, True)


def test_shutdown_returns_before_the_end(sidecar: SidecarProcess) -> None:
    """The deadline is the nearest of those that were given."""
    with slotcar_client.connect(sidecar.target) as client, client.session("busy"):
        assert answer(sidecar, "shutdown") == {"time_left_seconds": pytest.approx(5, abs=1), "ended": False}
        assert answer(sidecar, "shutdown", "--deadline", "3600")["time_left_seconds"] <= 5
    assert sidecar.process is not None
    assert sidecar.process.wait(STOP_SECONDS) == 0


@pytest.mark.parametrize("deadline", ["-1", "86401", "soon", "nan"])
def test_a_deadline_that_is_none_is_wrong_usage(sidecar: SidecarProcess, deadline: str) -> None:
    assert call(sidecar, "shutdown", "--deadline", deadline).exit_code == 2
    assert call(sidecar, "capacity").exit_code == 0


# The bundle


def unpacked(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        entries = archive.getmembers()
        assert {(entry.mode, entry.uid, entry.uname, entry.isreg()) for entry in entries} == {(0o600, 0, "", True)}
        parts = {entry.name.removeprefix(f"{bundle.FOLDER}/"): archive.extractfile(entry) for entry in entries}
        return {name: part.read() for name, part in parts.items() if part is not None}


def test_a_bundle_has_all_there_is_and_no_secret(sidecar: SidecarProcess, tmp_path: Path) -> None:
    file = tmp_path / "out.tar.gz"
    with slotcar_client.connect(sidecar.target) as client, client.session("engine") as session:
        client.load("sql", sidecar.root / "sql", tier="host")
        for uri in (f"https://user:{PASSWORD}@host/a", f"https://host/a?X-Amz-Signature={PASSWORD}"):
            with pytest.raises(SlotcarError):
                client.load("stolen", uri)
        result = call(sidecar, "snapshot", "-o", str(file))
        secret = session.session_id[8:]
        assert result.exit_code == 0, result.output
        found = unpacked(file)
        assert session.session_id[:8] in found["sessions.json"].decode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    manifest = json.loads(found.pop("manifest.json"))
    assert found.keys() == manifest["parts"].keys() == set(PARTS)
    assert (manifest["missing"], manifest["target"]) == ({}, sidecar.target)
    assert json.loads(found["server.json"])["settings"]["slots"] == "2"
    assert "slotcar_build_info" in found["metrics.txt"].decode()
    assert any(event["kind"] == "refused" for event in json.loads(found["events.json"]))
    assert json.loads(found["versions.json"])["packages"]["slotcar"]
    whole = b"".join(found.values())
    for planted in (TOKEN, PASSWORD, VARIABLE, secret):
        assert planted.encode() not in whole
    weights = (sidecar.root / "sql" / WEIGHTS_FILE).read_bytes()
    assert weights[-64:] not in whole
    assert [path.name for path in tmp_path.iterdir() if "out.tar" in path.name] == ["out.tar.gz"]


def test_a_server_that_hangs_gives_what_there_is(sidecar: SidecarProcess, tmp_path: Path) -> None:
    """And the file of before is replaced as a whole."""
    file = tmp_path / "out.tar.gz"
    file.write_text("an old one")
    sidecar.pause()
    try:
        manifest = answer(sidecar, "snapshot", "-o", str(file), "--timeout", "0.5")
    finally:
        sidecar.resume()
    assert manifest["missing"].keys() == set(ASKED)
    assert set(manifest["parts"]) == {"doctor.json", "versions.json", "machine.json"}
    assert unpacked(file).keys() == {"manifest.json", *manifest["parts"]}


def test_a_server_that_is_away_gives_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "out.tar.gz"
    arguments = ["snapshot", "--target", f"unix://{tmp_path}/nobody.sock", "-o", str(file)]
    result = invoke(*arguments)
    assert (result.exit_code, "without capacity.json: UNAVAILABLE" in result.output) == (0, True), result.output
    assert "cgroup" in unpacked(file)["machine.json"].decode()


def test_a_server_without_metrics_has_no_such_part(
    start_sidecar: Callable[..., SidecarProcess], root: Path, tmp_path: Path
) -> None:
    manifest = answer(start_sidecar(root), "snapshot", "-o", str(tmp_path / "out.tar.gz"))
    assert manifest["missing"] == {"metrics.txt": "the server serves no metrics: --metrics"}


async def test_a_part_that_fails_is_missing_and_others_are_there() -> None:
    def fail() -> bytes:
        raise ValueError("planted")

    async def ask(_: AsyncClient) -> bytes:
        return fail()

    async with aio.connect("unix:///nobody.sock") as client:
        asked = await snapshot._part(client, ask, 1.0)
    assert asked == snapshot._own_part(fail) == Missing("ValueError: planted")
    assert snapshot._own_part(lambda: b"") == b""
    assert json.loads(bundle.json_part({1: "one"})) == {"1": "one"}


def test_a_file_that_cannot_be_written_is_1(tmp_path: Path) -> None:
    arguments = ["snapshot", "--target", f"unix://{tmp_path}/nobody.sock", "-o", str(tmp_path / "no" / "x.tar.gz")]
    result = invoke(*arguments)
    assert (result.exit_code, "cannot be written" in result.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


SECRETS = {
    f"s3://key:{PASSWORD}@bucket/a": f"s3://{LEFT_OUT}@bucket/a",
    f"https://host/a?sig={PASSWORD}&x=1": f"https://host/a?{LEFT_OUT}",
    f"Authorization: Bearer {PASSWORD}": f"Authorization: Bearer {LEFT_OUT}",
    f"token={PASSWORD}, then": f"token={LEFT_OUT}, then",
    f"access_key_id: {PASSWORD}": f"access_key_id: {LEFT_OUT}",
    f"with {TOKEN} in it": f"with {LEFT_OUT} in it",
    "slotcar_mappings 3": "slotcar_mappings 3",
    "/srv/adapters/user@host": "/srv/adapters/user@host",
    "sql@sha256:00": "sql@sha256:00",
}


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_secret_is_left_out(text: str) -> None:
    assert bundle.text_part(text).decode() == SECRETS[text]
    assert json.loads(bundle.json_part([{"a": text}])) == [{"a": SECRETS[text]}]
    assert json.loads(bundle.json_part({"token": text, "hf_secret": text, "token_file": "/a", "password": ""})) == {
        "token": LEFT_OUT,
        "hf_secret": LEFT_OUT,
        "token_file": "/a",
        "password": "",
    }


def test_a_bundle_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    """Nor does it touch the one before."""
    (tmp_path / "out.tar.gz").write_text("an old one")
    with pytest.raises(TypeError):
        bundle.write(tmp_path / "out.tar.gz", {"a": b"", "b": Missing("x"), "c": "no bytes"}, {})  # type: ignore[dict-item]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.tar.gz", "an old one")]
