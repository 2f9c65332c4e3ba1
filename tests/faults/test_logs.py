"""The log and the audit stream of a real sidecar: what its lines say, and that nobody who reads them can hold it up."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import slotcar_client
import torch
from slotcar_client import Client, NotAllowed, SlotcarError

from tests.faults.gauges import Gauges
from tests.faults.oracle import Library, spec_file
from tests.server import SidecarProcess
from tests.waiting import PATIENCE_SECONDS, eventually

SITE, FEATURES = "layer", 64
A, B, C = "a", "b", "c"
PIPE_BYTES = 64 << 10
POLICY = """
apiVersion: slotcar.dev/v1
clients:
  - name: tester
    uid: [{}]
    verbs: [engine, load, operate, read]
    adapters: [a, b, c, up, nobody, "r*"]
    planes: [stream]
"""

Line = dict[str, Any]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    library = Library(tmp_path_factory.mktemp("adapters"), {SITE: (FEATURES, FEATURES)})
    for seed, name in enumerate((A, B, C)):
        library.write(name, seed=seed, sites=[SITE])
    return library


class Stage(NamedTuple):
    """A sidecar with two slots that writes JSON lines at debug level; `audit` and `level` are files of it."""

    sidecar: SidecarProcess
    client: Client
    library: Library
    audit: Path
    level: Path

    def lines(self, **wanted: object) -> list[Line]:
        """Those of the log with these fields; each line must be one value."""
        return like(self.sidecar.log, wanted)

    def audited(self, **wanted: object) -> list[Line]:
        files = sorted(self.audit.parent.glob("audit*"), key=lambda path: path.stat().st_ino)
        return like("".join(path.read_text(encoding="utf-8") for path in files), wanted)

    def load(self, name: str, folder: str = "", **options: Any) -> str:
        return self.client.load(name, self.library.root / (folder or name), **options).adapter.digest

    def hang_up(self) -> None:
        assert self.sidecar.process is not None
        self.sidecar.process.send_signal(signal.SIGHUP)


def like(text: str, wanted: dict[str, object]) -> list[Line]:
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in found if all(line.get(key) == value for key, value in wanted.items())]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("s")
    (folder / "level").write_text("debug\n")
    (folder / "policy").write_text(POLICY.format(os.getuid()), encoding="utf-8")
    extra = (
        *("--model-spec", str(spec_file(folder, library.sites)), "--log-format", "json"),
        *("--log-level-file", str(folder / "level"), "--audit-log", str(folder / "audit")),
        *("--metrics", "127.0.0.1:0", "--policy", str(folder / "policy")),
    )
    with ExitStack() as stack:
        sidecar = stack.enter_context(SidecarProcess(folder, library.root, slots=2, extra=extra))
        client = stack.enter_context(slotcar_client.connect(sidecar.target))
        yield Stage(sidecar, client, library, folder / "audit", folder / "level")


def test_the_life_of_an_adapter_is_in_the_log_and_in_the_audit(stage: Stage) -> None:
    first = stage.load(A)
    second = stage.load(A, B, replace=True)
    third = stage.load(C)
    stage.client.keep(C)
    stage.client.release_keep(C)
    stage.client.upload("up", stage.library.root / A)
    stage.client.unload(C)
    with pytest.raises(SlotcarError):
        stage.load("nobody", "nowhere")
    eventually(lambda: stage.audited(adapter="nobody"), "the last line of the audit")
    steps = [(line["action"], line["adapter"], line.get("digest", "")) for line in stage.audited()]
    assert steps == [
        ("load", A, first),
        ("replace", A, second),
        ("load", C, third),
        ("keep", C, third),
        ("release", C, third),
        ("evict", A, second),
        ("upload", "up", first),
        ("unload", C, third),
        ("load", "nobody", ""),
    ]
    (loaded,) = stage.audited(action="load", adapter=C)
    assert loaded["source"] == str(stage.library.root / C)
    assert (loaded["caller"], loaded["peer"].startswith("unix:")) == ("tester", True)
    assert (loaded["outcome"], loaded["message"]) == ("done", "audit")
    assert stage.audited(action="evict")[0]["reason"] == "slot taken by up"
    refused = stage.audited(adapter="nobody")[0]
    assert (refused["outcome"], refused["reason"].partition(":")[0]) == ("refused", "SOURCE_UNAVAILABLE")
    epochs = {line.get("epoch") for line in stage.lines()[2:]}
    assert len(epochs) == 1
    assert epochs.pop()
    (event,) = stage.lines(logger="slotcar.events", message="replaced")
    assert (event["adapter"], second.startswith(event["digest"])) == (A, True)
    assert event["generation"] > 1
    assert event["time"].endswith("+00:00")


def test_who_is_denied_is_in_the_audit(stage: Stage) -> None:
    for name in ("secret", "no\nbody"):
        with pytest.raises(NotAllowed):
            stage.load(name, A)
    eventually(lambda: len(stage.audited(action="denied")) == 2, "the lines")
    for line in stage.audited(action="denied"):
        assert (line["caller"], line["method"], line["reason"]) == ("tester", "LoadAdapter", "NOT_ALLOWED")


def test_a_hostile_source_forges_no_line(stage: Stage) -> None:
    source = 'x\n{"level": "error", "logger": "forged"}\r\u2028\x1b[2J'
    with pytest.raises(SlotcarError):
        stage.load("nobody", source)
    eventually(lambda: stage.lines(message="refused") and stage.audited(adapter="nobody"), "the lines")
    lines = stage.sidecar.log.splitlines()
    assert all(json.loads(line)["logger"].startswith(("slotcar", "watchfiles")) for line in lines)


def test_debug_has_each_call_and_what_loads_decide_but_no_forward(stage: Stage) -> None:
    stage.load(B)
    with stage.client.session(transport="unary") as session:
        session.set_mapping([B], load=True)
        session.forward({SITE: torch.ones(1, FEATURES)}, [1])
    with pytest.raises(SlotcarError):
        stage.client.unload("nobody")
    eventually(lambda: stage.lines(message="call", method="UnloadAdapter", reason="ADAPTER_NOT_FOUND"), "the line")
    calls = stage.lines(message="call")
    assert {call["method"] for call in calls} >= {"LoadAdapter", "SetMapping", "UnloadAdapter"}
    assert not any("Forward" in call["method"] for call in calls)
    assert all(call["seconds"] >= 0 and call["logger"] == "slotcar.rpc" for call in calls)
    taken = stage.lines(logger="slotcar.loads", message="slot taken", adapter=B)[-1]
    assert (taken["slot"] in (0, 1), taken["purpose"]) == (True, "load")


def test_the_level_follows_its_file_and_whoever_said_so_last_counts(stage: Stage) -> None:
    def level_is(wanted: str) -> None:
        eventually(lambda: stage.client.settings().log_level == wanted, f"level {wanted}")

    level_is("debug")
    stage.level.write_text("warning\n")
    level_is("warning")
    stage.client.set_log_level("error")
    stage.hang_up()
    level_is("warning")
    stage.level.write_text("loud\n")
    eventually(lambda: stage.lines(level="error", what="log level"), "the refusal of a word that is no level")
    level_is("warning")
    stage.level.write_text("debug\n")
    level_is("debug")


def test_a_rotation_under_load_loses_no_line(stage: Stage) -> None:
    loads = 60

    def load() -> None:
        with slotcar_client.connect(stage.sidecar.target) as client:
            for number in range(loads):
                client.load(f"r{number}", stage.library.root / A, tier="host")

    worker = threading.Thread(target=load)
    worker.start()
    rotations = 0
    while worker.is_alive():
        rotations += 1
        stage.audit.rename(stage.audit.with_name(f"audit.{rotations}"))
        stage.hang_up()
        eventually(stage.audit.exists, "the next file")
    worker.join()
    last = f"r{loads - 1}"
    eventually(lambda: stage.audited(action="load", adapter=last), "the last line")
    names = [line["adapter"] for line in stage.audited(action="load") if line["adapter"].startswith("r")]
    assert sorted(names, key=lambda name: int(name[1:])) == [f"r{number}" for number in range(loads)]
    assert rotations > 1
    assert Gauges(stage.sidecar).read("slotcar_audit_failures_total") == 0
    assert stage.audit.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("settings", [("--audit-log", "{}/nowhere/audit"), ("--log-level-file", "{}/nowhere")])
def test_a_file_that_cannot_be_used_is_refused(library: Library, tmp_path: Path, settings: tuple[str, str]) -> None:
    flag, value = settings[0], settings[1].format(tmp_path)
    with pytest.raises(AssertionError, match="ended with 1"):
        SidecarProcess(tmp_path, library.root, extra=(flag, value)).start()
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert f"{flag} {value} cannot be" in log
    assert "Traceback" not in log


def metrics_url(read: int) -> str:
    """As the log says it; what comes after is not read."""
    text = ""
    while (found := re.search(r"http://127\.0\.0\.1:\d+/metrics", text)) is None:
        text += os.read(read, 1024).decode()
    return found[0]


def dropped(url: str) -> float:
    with urllib.request.urlopen(url) as response:
        found = re.search(r"^slotcar_log_lines_dropped_total (\S+)$", response.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_log_that_nobody_reads_holds_up_nothing(library: Library, tmp_path: Path) -> None:
    """The pipe is full long before the last event: loads and Forwards go on, lines are counted, and the end comes."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    extra = ("--model-spec", str(spec_file(tmp_path, library.sites)), "--metrics", "127.0.0.1:0")
    sidecar = SidecarProcess(tmp_path, library.root, slots=2, extra=(*extra, "--log-level", "debug"))
    process = subprocess.Popen(sidecar.command(), stderr=write, stdout=write, env=os.environ | {"OMP_NUM_THREADS": "1"})
    os.close(write)
    try:
        url = metrics_url(read)
        with grpc.insecure_channel(sidecar.target.replace("unix://", "unix:")) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_SECONDS)
        with slotcar_client.connect(sidecar.target) as client, client.session(transport="unary") as session:
            client.load(A, library.root / A)
            session.set_mapping([A])
            while not dropped(url):
                for _ in range(100):
                    client.keep(A)
                    client.release_keep(A)
            session.forward({SITE: torch.ones(1, FEATURES)}, [1])
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read)
