"""What the demo's acts stand on: a sidecar in a process of its own, operators in others, and events as they happen."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import slotcar_client
from rich.console import Console
from rich.padding import Padding
from slotcar_client import Client, Event

if TYPE_CHECKING:
    from slotcar_sidecar.demo.host import Host

_START_SECONDS = 60
_POLL_SECONDS = 0.1
_STOP_SECONDS = 30
_EVENT_SECONDS = 10.0


class StageError(Exception):
    """A process of the demo failed; the message has its output."""


@contextlib.contextmanager
def sidecar(host: Host, work: Path, slots: int) -> Iterator[str]:
    """Runs `slotcar serve` while the context is open; gives its address."""
    target = f"unix://{work}/{slots}.sock"
    log = work / f"{slots}.log"
    options = ("--slots", str(slots), "--max-rank", "16", "--shutdown-seconds", "1")
    where = ("--listen", target, "--base-model", str(host.folder), "--root", str(host.root))
    command = [sys.executable, "-m", "slotcar_sidecar", "serve", *where, *options]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            _wait_until_ready(target, process, log)
            yield target
        finally:
            process.terminate()
            process.wait(_STOP_SECONDS)


def _wait_until_ready(target: str, process: subprocess.Popen[bytes], log: Path) -> None:
    with slotcar_client.connect(target) as client:
        for _ in range(int(_START_SECONDS / _POLL_SECONDS)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
                break
            with contextlib.suppress(slotcar_client.Unavailable):
                client.snapshot()
                return
    raise StageError(f"the sidecar did not start:\n{log.read_text(encoding='utf-8')}")


def operator(console: Console, target: str, *arguments: str) -> None:
    """Runs a `slotcar` command in another process, as an operator would, and shows it."""
    shown = " ".join(f"…/{Path(word).name}" if word.startswith("/") else word for word in arguments)
    console.print(f"  [bold cyan]$ slotcar {shown}[/]", highlight=False)
    command = [sys.executable, "-m", "slotcar_sidecar", *arguments, "--target", target]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_START_SECONDS)
    if done.returncode != 0:
        raise StageError(done.stderr + done.stdout)


class Events:
    """Prints what happens to adapters and slots, and lets an act wait until it was printed."""

    def __init__(self, console: Console, client: Client) -> None:
        self._console = console
        self._seen: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        self._stream = client.events()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Events:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._thread.join(_EVENT_SECONDS)

    def wait_for(self, kind: str, name: str = "") -> None:
        """Returns when such an event was printed since the last call that waited for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: (kind, name) in self._seen, _EVENT_SECONDS):
                raise StageError(f"no event {kind} {name}")
            self._seen.remove((kind, name))

    def _read(self) -> None:
        with contextlib.suppress(slotcar_client.SlotcarError):
            for event in self._stream:
                self._console.print(Padding(f"[dim]event[/] {_line(event)}", (0, 0, 0, 2)), highlight=False)
                with self._changed:
                    self._seen.append((event.kind, event.name))
                    self._changed.notify_all()


def _line(event: Event) -> str:
    parts = [f"generation {event.generation}", f"[bold]{event.kind}[/]"]
    parts += [event.name] if event.name else []
    parts += [f"slot {event.slot}"] if event.slot is not None else []
    parts += [f"({event.reason})"] if event.reason else []
    return " ".join(parts)


def check_equal(console: Console, what: str, found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> None:
    """Every token delivered must equal the undisturbed run's."""
    count = sum(map(len, found))
    if [list(tokens) for tokens in found] != [list(tokens) for tokens in wanted]:
        raise StageError(f"{what}: the tokens differ from the undisturbed run:\n{found}\n{wanted}")
    console.print(f"  [bold green]✓ all {count} tokens equal the undisturbed run's[/]", highlight=False)
