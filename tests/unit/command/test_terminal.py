"""What a person has at a terminal: the picture of all, narrow lists, and completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import slotcar_client

from tests.server import SidecarProcess
from tests.unit.command.called import answer, call, invoke, on_terminal


@pytest.mark.parametrize(("columns", "key"), [(40, b"\x03"), (200, b"\x03"), (200, b"q")])
def test_top_on_a_terminal_until_a_key(
    sidecar: SidecarProcess, engine: slotcar_client.Session, columns: int, key: bytes
) -> None:
    code, shown = on_terminal(sidecar, columns, "top", key=key)
    assert code == 0
    assert "Traceback" not in shown
    assert sidecar.target[: columns - 1] in shown
    assert "my [red]engine" in shown
    assert "slots     [##########          ]  50%" in shown
    assert ("hold 9, mapping 1" in shown) == (columns == 200)
    assert shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h")  # the terminal is as it was


def test_top_without_a_terminal_shows_it_once(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    result = call(sidecar, "top")
    assert result.exit_code == 0
    for text in (f"{sidecar.target}  up", "IN NO SLOT", f"my [red]engine {engine.session_id[:8]}: hold 9, mapping 1"):
        assert text in result.output
    assert "session_opened" in result.output
    view = answer(sidecar, "top")
    assert (view["state"], len(view["layout"]["slots"]), view["undone"]) == ("up", 2, [])
    assert view["events"][-1]["kind"] == "held"
    assert invoke("top", "--target", "unix:///nobody").exit_code == 1


def test_lists_on_a_narrow_terminal_lose_nothing(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    for verb in ("list", "sessions"):
        code, shown = on_terminal(sidecar, 40, verb)
        assert code == 0
        assert "…" not in shown
        assert f"pinned by my [red]engine {engine.session_id[:8]}: hold 9, mapping 1" in shown


# Completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_one_of_the_shell(shell: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert "_SLOTCAR_COMPLETE" in result.stdout
    path = shutil.which(shell)
    if path is not None:
        option = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([path, option], input=result.stdout, text=True, check=True, timeout=30)
    assert shell != "bash" or path is not None, "the suite needs bash"


def completed(words: str, target: str, *more: str) -> list[str]:
    """What the shell would offer for the last word."""
    variables = {"_SLOTCAR_COMPLETE": "bash_complete", "COMP_WORDS": words, "SLOTCAR_TARGET": target}
    count = len(words.split(" ")) - 1
    command = [sys.executable, "-c", "from slotcar_sidecar.cli import main; main(prog_name='slotcar')", *more]
    environment = os.environ | variables | {"COMP_CWORD": str(count)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_names_and_sessions_are_completed(sidecar: SidecarProcess, engine: slotcar_client.Session) -> None:
    assert completed("slotcar unload s", sidecar.target) == ["sql"]
    assert completed("slotcar show ", sidecar.target) == ["red", "sql"]
    assert completed("slotcar end ", sidecar.target) == [engine.session_id[:8]]
    assert completed(f"slotcar show --target {sidecar.target} s", "unix:///nobody") == ["sql"]
    assert {"watch", "release"} & set(completed("slotcar w", sidecar.target)) == {"watch"}


def test_completion_is_silent_without_a_server() -> None:
    assert completed("slotcar show s", "unix:///nobody") == []
    assert completed("slotcar show s", "nonsense") == []
