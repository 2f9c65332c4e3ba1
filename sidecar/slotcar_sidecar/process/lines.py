"""Writes log lines in a thread of its own, so that nobody who logs ever waits for who reads them.

Invariant: the queue is bounded, as are its lines; a line that finds no room is dropped whole, and counted. The thread
holds no lock while it writes, so that a reader who has stopped holds up neither the process nor its end; nothing that
fails in it ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slotcar_sidecar.ops.logs import MOST_LINE_BYTES

_MOST_LINES = 4096
_FLUSH_SECONDS = 1.0
_CUT = "…".encode()


class Sink(Protocol):
    """Where lines go. Only the thread that writes calls it."""

    def write(self, line: bytes) -> None:
        """May block, or raise OSError."""


class Lines(logging.Handler):
    """Makes lines of records and queues them. `when_lost` is told how many are lost each time, in any thread.

    `logging.shutdown`, and so the end of the process, flushes it, for a bounded time.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        super().__init__()
        self._sink = sink
        self._queue: queue.Queue[bytes | Callable[[], None]] = queue.Queue(_MOST_LINES)
        self._lost = 0
        self.when_lost: Callable[[int], None] = self._remember
        # A daemon: nothing but the time above holds up the end of the process.
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def observe(self, when_lost: Callable[[int], None]) -> None:
        """Tells `when_lost` of the lines that are lost, also of those that were."""
        self.when_lost = when_lost
        when_lost(self._lost)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = _cut(self.format(record).encode("utf-8", "backslashreplace"))
            self._queue.put_nowait(line + b"\n")
        except queue.Full:
            self.when_lost(1)
        except Exception:
            self.handleError(record)

    def after_lines(self, call: Callable[[], None]) -> None:
        """Lets the thread call it when the lines of before are written. Raises OSError when there is no room."""
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            raise OSError("too many lines wait to be written") from None

    def flush(self) -> None:
        """Returns when the lines of before are written, or after a second or two."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._queue.put(written.set, timeout=_FLUSH_SECONDS)
            written.wait(_FLUSH_SECONDS)

    def _remember(self, count: int) -> None:
        self._lost += count

    def _write(self) -> None:
        while True:
            item = self._queue.get()
            try:
                if isinstance(item, bytes):
                    self._sink.write(item)
                else:
                    item()
            except Exception:
                self.when_lost(1)


class Descriptor:
    """A descriptor that others may share, such as standard error: a pipe that is full is waited for."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, line: bytes) -> None:
        _write_all(self._descriptor, line)


class AppendedFile:
    """A file that lines are appended to. `when_failed` is told why a line is not written, once until one is again."""

    def __init__(self, path: Path, when_failed: Callable[[OSError], None]) -> None:
        """Raises OSError."""
        self._descriptor = open_appended(path)
        self._when_failed = when_failed
        self._has_failed = False

    def write(self, line: bytes) -> None:
        try:
            # Of the line that failed, a part may be there.
            _write_all(self._descriptor, b"\n" + line if self._has_failed else line)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._when_failed(error)
            raise
        self._has_failed = False

    def go_on_in(self, descriptor: int) -> None:
        """The lines from now on are for another file. Raises OSError when the one before lost some at its end."""
        before, self._descriptor, self._has_failed = self._descriptor, descriptor, False
        os.close(before)


def open_appended(path: Path) -> int:
    """A descriptor that appends; a new file has mode 0640. Raises OSError, at once for a pipe that nobody reads."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    return os.open(path, flags, 0o640)


def _cut(line: bytes) -> bytes:
    """The beginning of what is too long, in whole characters."""
    if len(line) <= MOST_LINE_BYTES:
        return line
    return line[: MOST_LINE_BYTES - len(_CUT)].decode("utf-8", "ignore").encode() + _CUT


def _write_all(descriptor: int, data: bytes) -> None:
    """Raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # a pipe that does not wait by itself
            # Not `select.select`, which takes no descriptor above 1023.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
