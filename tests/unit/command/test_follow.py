"""Events and watch, as processes: they end by signals, and by what happens to a pipe or a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import SidecarProcess
from tests.unit.command.called import call, is_readable


def start(sidecar: SidecarProcess, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "slotcar_sidecar", *arguments]
    environment = os.environ | {"SLOTCAR_TARGET": sidecar.target}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    """The exit code and what was printed, when it ends."""
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_past_events_are_printed_and_selected(sidecar: SidecarProcess) -> None:
    assert call(sidecar, "load", "sql", str(sidecar.root / "sql")).exit_code == 0
    assert call(sidecar, "load", "nothing", "/etc").exit_code == 1
    assert call(sidecar, "unload", "sql").exit_code == 0
    lines = call(sidecar, "events", "--json").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in lines][-4:] == ["loaded", "refused", "unloaded", "freed"]
    (line,) = call(sidecar, "events", "--replay", "3", "--kind", "refused").stdout.splitlines()
    assert "SOURCE_DENIED" in line
    assert call(sidecar, "events", "--replay", "0").stdout == ""
    assert call(sidecar, "events", "--kind", "nonsense").exit_code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_following_events_ends_with_a_signal(sidecar: SidecarProcess, number: signal.Signals) -> None:
    process = start(sidecar, "events", "-f", "--json", "--replay", "0", "--kind", "loaded", "--kind", "refused")
    assert process.stdout is not None
    while True:  # until it listens
        call(sidecar, "load", "nothing", "/etc")
        if is_readable(process.stdout.fileno()):
            break
    assert json.loads(process.stdout.readline())["kind"] == "refused"
    process.send_signal(number)
    code, _, err = ended(process)
    assert (code, err) == (0, b"")


def test_a_reader_that_has_seen_enough_ends_the_stream(sidecar: SidecarProcess) -> None:
    call(sidecar, "load", "nothing", "/etc")
    for arguments in (("events", "-f"), ("events", "--json"), ("watch",), ("watch", "--json"), ("list",)):
        process = start(sidecar, *arguments)
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0, arguments
        assert process.stderr is not None
        assert process.stderr.read() == b"", arguments
        process.stderr.close()


def test_events_and_watch_when_the_server_goes_and_comes(tmp_path: Path, sidecar: SidecarProcess) -> None:
    with SidecarProcess(tmp_path, sidecar.root) as server:
        events, watch = start(server, "events", "--follow"), start(server, "watch", "--json", "--interval", "0.2")
        plain = start(server, "watch", "--interval", "0.2")
        assert watch.stdout is not None
        assert plain.stdout is not None
        before = json.loads(watch.stdout.readline())
        assert (before["state"], before["capacity"]["slots"]) == ("up", 2)
        assert plain.stdout.readline().startswith(f"epoch {before['layout']['version']['epoch']} ".encode())
        server.kill()
        code, out, err = ended(events)
        assert (code, out) == (1, b"")
        assert b"UNAVAILABLE" in err
        assert json.loads(watch.stdout.readline())["state"] == "away"
        assert any(line.startswith(b"away: ") for line in plain.stdout)
        server.start()
        after = json.loads(watch.stdout.readline())
        assert after["state"] == "up"
        assert after["layout"]["version"]["epoch"] != before["layout"]["version"]["epoch"]
        assert any(line.startswith(f"epoch {after['layout']['version']['epoch']} ".encode()) for line in plain.stdout)
        call(server, "load", "nothing", "/etc")
        (refused,) = json.loads(watch.stdout.readline())["events"]
        assert (refused["kind"], refused["name"]) == ("refused", "nothing")
        for process in (watch, plain):
            process.send_signal(signal.SIGINT)
            code, _, err = ended(process)
            assert (code, err) == (0, b"")
