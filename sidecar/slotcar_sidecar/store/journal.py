"""The journal's file: replaced whole or not at all, and owned by one sidecar for as long as it lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from slotcar_sidecar.core.journal import JournalDamaged, JournalEntry, decode, encode

_MAX_BYTES = 1 << 30
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class JournalStep(StrEnum):
    """The points between which a process may die, for tests that make it."""

    BEGUN = "journal begun"
    WRITTEN = "journal written"
    NAMED = "journal named"


class JournalInUse(Exception):
    """Another sidecar has the journal."""


class JournalFile:
    """Blocks. Not safe for threads."""

    def __init__(self, path: Path, reach: Callable[[JournalStep], None] = lambda _: None) -> None:
        """Locks the journal at `path`, whose folder must be there. Raises JournalInUse or OSError."""
        self._path = path
        self._reach = reach
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise JournalInUse(f"another slotcar has the journal {path}") from None

    def close(self) -> None:
        """Gives the journal up."""
        os.close(self._lock)

    def read(self) -> tuple[JournalEntry, ...]:
        """What was written last, nothing if nothing was. Raises JournalDamaged or OSError."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)
        except FileNotFoundError:
            return ()
        try:
            mode = os.fstat(descriptor).st_mode
            # Anything else must not be set aside as a damaged journal.
            if not stat.S_ISREG(mode):
                found = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                raise OSError(errno.EINVAL, f"it is {found}, wanted a file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(_MAX_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(data) > _MAX_BYTES:
            raise JournalDamaged(f"it has more than {_MAX_BYTES} bytes")
        return decode(data)

    def set_aside(self) -> Path:
        """Renames what is there to <name>.corrupt, so that the next write does not destroy it. Raises OSError."""
        aside = self._path.with_name(f"{self._path.name}.corrupt")
        self._path.replace(aside)
        return aside

    def write(self, entries: list[JournalEntry]) -> None:
        """Replaces the journal. Raises OSError, and leaves the one of before then."""
        temporary = self._path.with_name(f"{self._path.name}.new")
        # Nobody but the owner of the lock writes it, so what is there is of one that died.
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            self._reach(JournalStep.BEGUN)
            file.write(encode(entries))
            file.flush()
            os.fsync(descriptor)
        self._reach(JournalStep.WRITTEN)
        temporary.replace(self._path)
        self._reach(JournalStep.NAMED)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
