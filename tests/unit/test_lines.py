"""Log lines on their way out: nobody who logs waits, and what is lost is counted."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from slotcar_sidecar.ops.logs import MOST_LINE_BYTES
from slotcar_sidecar.process.lines import AppendedFile, Descriptor, Lines, open_appended

PATIENCE_SECONDS = 30.0
# A descriptor that `select` has no room for.
HIGH = 1100


class Gate:
    """A sink that stands still until it is opened."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_SECONDS)
        self.lines.append(line)


class Broken:
    """A sink whose disk is full."""

    def write(self, line: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Counted:
    """Counts what is lost, and says when there is something."""

    def __init__(self) -> None:
        self.count, self.seen = 0, threading.Event()

    def __call__(self, count: int) -> None:
        self.count += count
        if count:
            self.seen.set()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("slotcar", logging.INFO, __file__, 1, text, (), None)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    """This process may have more than `select` can name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft <= HIGH:  # no limit is below 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (HIGH + 1, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_logs_waits_for_nobody_and_what_finds_no_room_is_counted() -> None:
    gate, lost = Gate(), Counted()
    lines = Lines(gate, "test")
    lines.emit(record("first"))
    assert gate.entered.wait(PATIENCE_SECONDS)
    for number in range(5000):
        lines.emit(record(f"line {number}"))
    lines.observe(lost)
    assert lost.count == 5000 - 4096
    gate.opened.set()
    lines.flush()
    assert gate.lines == [b"first\n", *(f"line {number}\n".encode() for number in range(4096))]
    lines.emit(record("later"))
    lines.flush()
    assert (gate.lines[-1], lost.count) == (b"later\n", 904)


def test_the_end_waits_a_moment_for_a_reader_and_no_longer() -> None:
    gate = Gate()
    lines = Lines(gate, "test")
    lines.emit(record("first"))
    assert gate.entered.wait(PATIENCE_SECONDS)
    lines.flush()  # which logging.shutdown calls: it comes back
    assert gate.lines == []
    gate.opened.set()


def test_what_cannot_be_written_is_counted() -> None:
    lost = Counted()
    lines = Lines(Broken(), "test")
    lines.observe(lost)
    lines.emit(record("first"))
    lines.flush()
    assert lost.count == 1


def test_whatever_fails_in_the_thread_does_not_end_it() -> None:
    """As the end of a file does that could not be written out."""
    gate, lost = Gate(), Counted()
    gate.opened.set()
    lines = Lines(gate, "test")
    lines.observe(lost)
    lines.after_lines(partial(os.close, -1))
    lines.after_lines(partial(int, "nonsense"))
    lines.emit(record("later"))
    lines.flush()
    assert (gate.lines, lost.count) == ([b"later\n"], 2)


@pytest.mark.parametrize("letter", ["x", "\N{HEAVY BLACK HEART}", "\N{ROCKET}"])
def test_a_line_has_no_more_bytes_than_it_may(letter: str) -> None:
    gate = Gate()
    gate.opened.set()
    lines = Lines(gate, "test")
    for count in (MOST_LINE_BYTES // len(letter.encode()), MOST_LINE_BYTES):
        lines.emit(record(letter * count))
    lines.emit(record("first" + letter * MOST_LINE_BYTES))
    lines.flush()
    whole, *cut = (line.decode().removesuffix("\n") for line in gate.lines)
    assert set(whole) == {letter}
    for text in cut:
        assert text.removeprefix("first").strip(letter) in ("…", "")
        assert len(text.encode()) <= MOST_LINE_BYTES


def test_a_line_goes_out_whole_through_a_pipe_that_does_not_wait(pipe: tuple[int, int]) -> None:
    """Another process that has the pipe may have set it so."""
    read, write = pipe
    os.set_blocking(write, False)
    line = b"x" * (1 << 20) + b"\n"
    writer = threading.Thread(target=Descriptor(write).write, args=(line,))
    writer.start()
    found = b""
    while not found.endswith(b"\n"):
        found += os.read(read, 1 << 16)
    writer.join(PATIENCE_SECONDS)
    assert found == line


@pytest.mark.usefixtures("_many_descriptors")
def test_a_pipe_is_waited_for_whatever_its_number() -> None:
    """`select` takes none above 1023, which a busy server has."""
    read, write = os.pipe()
    high = fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(write)
    os.set_blocking(high, False)
    fcntl.fcntl(high, fcntl.F_SETPIPE_SZ, 4096)  # so that it is full time and again
    line = b"x" * (1 << 20) + b"\n"

    def write_all() -> None:
        with os.fdopen(high, "wb", buffering=0):
            Descriptor(high).write(line)

    with os.fdopen(read, "rb") as pipe, ThreadPoolExecutor(1) as pool:
        written = pool.submit(write_all)
        found = pipe.read()
        written.result(PATIENCE_SECONDS)
    assert found == line


def test_a_file_is_for_its_owner_and_group_and_grows_only(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    path.write_bytes(b"before\n")
    AppendedFile(path, lambda _: None).write(b"after\n")
    assert path.read_bytes() == b"before\nafter\n"
    new, mask = tmp_path / "new", os.umask(0)
    try:
        os.close(open_appended(new))
    finally:
        os.umask(mask)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


def test_a_pipe_that_nobody_reads_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        open_appended(tmp_path / "pipe")


def test_a_rotation_loses_no_line_and_splits_none(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    file, lost = AppendedFile(path, lambda _: None), Counted()
    lines = Lines(file, "test")
    lines.observe(lost)

    def rotate(number: int) -> None:
        path.rename(tmp_path / f"audit.{number}")
        descriptor = open_appended(path)
        lines.after_lines(lambda: file.go_on_in(descriptor))

    for number in range(2000):
        lines.emit(record(str(number)))
        if number % 100 == 50:
            rotate(number)
    lines.flush()
    parts = sorted(tmp_path.glob("audit.*"), key=lambda part: int(part.suffix[1:]))
    written = b"".join(part.read_bytes() for part in (*parts, path))
    assert (written, lost.count) == (b"".join(b"%d\n" % number for number in range(2000)), 0)


def test_a_failure_is_told_once_and_the_next_line_is_a_line(tmp_path: Path) -> None:
    """/dev/full takes nothing, like a disk without room."""
    told: list[OSError] = []
    file = AppendedFile(Path("/dev/full"), told.append)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            file.write(b"lost\n")
    assert [error.errno for error in told] == [errno.ENOSPC]
    file.go_on_in(open_appended(tmp_path / "audit"))
    file.write(b"written\n")
    assert (tmp_path / "audit").read_bytes() == b"written\n"
