"""Reads files that people change: all of a file, of one moment, within a bound, and only if it is a regular one.

Links are followed: a mounted ConfigMap is a link to a link, and each reading resolves it anew.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from slotcar_sidecar.core.desired import DesiredSet
from slotcar_sidecar.core.errors import RequestInvalid, SourceUnavailable
from slotcar_sidecar.sync.declaration import declared

MAX_FILE_BYTES = 1 << 20


class Declaration(NamedTuple):
    """A version of the file: a digest of its text, and what that declares."""

    version: str
    desired: DesiredSet


def identity(path: Path) -> Hashable:
    """What changes when the file does; None where there is none that can be looked at."""
    try:
        return _identity(path.stat())
    except (OSError, ValueError):  # the latter for what can be no path
        return None


def read(path: Path) -> Declaration:
    """What the file declares now. Raises SourceUnavailable without a file to read, RequestInvalid for a bad text."""
    try:
        data = contents(path, MAX_FILE_BYTES)
    except OSError as error:
        raise SourceUnavailable(f"{path} cannot be read: {error.strerror}", source=path) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestInvalid("the file", found=f"bytes that are not UTF-8 at {error.start}", wanted="UTF-8") from error
    return Declaration(f"sha256:{hashlib.sha256(data).hexdigest()}", declared(text, str(path)))


def contents(path: Path, most_bytes: int) -> bytes:
    """All bytes of a regular file; waits for nobody. Raises OSError, SourceUnavailable, or RequestInvalid for more."""
    # Opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise SourceUnavailable(f"{path} is no regular file", source=path, wanted="a regular file")
        data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise RequestInvalid("the file", found="more bytes", wanted=f"at most {most_bytes}")
        if _identity(os.fstat(descriptor)) != _identity(before):
            raise SourceUnavailable(f"{path} changed while it was read", source=path)
    return data


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
