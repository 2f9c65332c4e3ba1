"""The floor of a doorbell in shared memory: pingpong.c, compiled with the system's compiler when it is wanted."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Took
from tests.bench.sides import Side, took

__all__ = ["Unavailable", "compiled", "ping_pong"]

_SOURCE = Path(__file__).with_name("pingpong.c")
_WORD_BYTES = 8


class Unavailable(Exception):
    """Why there is no such peer here."""


def compiled(folder: Path) -> Path:
    """The program, made in `folder`. Raises Unavailable."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unavailable("this machine has no C compiler")
    program = folder / "pingpong"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(program), str(_SOURCE)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{_SOURCE.name} does not compile: {done.stderr}")
    return program


@contextlib.contextmanager
def ping_pong(program: Path, size_bytes: int) -> Iterator[Side]:
    """Two processes that send `size_bytes` to and fro; they run on the cores on which the caller runs."""
    with subprocess.Popen([program, str(size_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield lambda calls: _round_trips(process, calls)


def _round_trips(process: subprocess.Popen[bytes], calls: int) -> list[Took]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(calls.to_bytes(_WORD_BYTES, "little"))
    process.stdin.flush()
    answer = array("Q", process.stdout.read(_WORD_BYTES * (calls + 1)))
    assert len(answer) == calls + 1, "pingpong ended"
    *walls, cpu = answer
    return took(walls, cpu)
