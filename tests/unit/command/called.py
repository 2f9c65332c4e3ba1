"""The command line as it is called, in this process and on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from typing import Any

from click.testing import CliRunner, Result
from slotcar_sidecar import cli

from tests.server import SidecarProcess


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, env=environment)


def call(sidecar: SidecarProcess, *arguments: str) -> Result:
    return invoke(*arguments, SLOTCAR_TARGET=sidecar.target)


def answer(sidecar: SidecarProcess, *arguments: str) -> Any:
    result = call(sidecar, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def is_readable(descriptor: int) -> bool:
    waiting = select.poll()  # `select.select` takes no descriptor above 1023
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(200))


def on_terminal(sidecar: SidecarProcess, columns: int, *arguments: str, key: bytes = b"") -> tuple[int, str]:
    """Runs the command on a terminal so wide; one that goes on gets a key when it has shown something."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    command = [sys.executable, "-c", _WITH_TERMINAL, *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"SLOTCAR_TARGET": sidecar.target, "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
            if key and b"SLOT" in shown and not is_readable(ours):
                os.write(ours, key)
                key = b""
    except OSError:  # what a terminal says when its other end is closed
        pass
    os.close(ours)
    return process.wait(30), shown.decode()


_WITH_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from slotcar_sidecar.cli import main
main()
"""
