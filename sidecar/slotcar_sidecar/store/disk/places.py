"""Opens files and folders beneath the disk tier's root, so that no link, and nobody else's file, is ever followed.

Everything is opened from the descriptor of the folder above; files are 0600, folders 0700, and all belong to the user
of this process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from slotcar_sidecar.store.disk.entry import Damaged

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without waiting: a named pipe would block for ever.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotOurs(Exception):
    """Why a folder cannot be the disk tier's, whatever is in it."""


def open_root(path: Path) -> int:
    """The root, made if its parent is there. Raises NotOurs or OSError."""
    try:
        path.mkdir(0o700, exist_ok=True)
        return _ours(os.open(path, _FOLDER), str(path))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
            raise NotOurs(f"{path} is not a folder, or is a link to one") from error
        raise


def open_folder(name: str, parent: int, *, make: bool = True) -> int:
    """A folder beneath `parent`. Raises NotOurs or OSError."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    return _ours(os.open(name, _FOLDER, dir_fd=parent), name)


def _ours(descriptor: int, name: str) -> int:
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE:
        return descriptor
    os.close(descriptor)
    if found.st_uid != os.geteuid():
        raise NotOurs(f"{name} belongs to user {found.st_uid}, the server runs as {os.geteuid()}")
    raise NotOurs(f"{name} has mode {stat.S_IMODE(found.st_mode):o}: others may write there")


@contextlib.contextmanager
def folder(name: str, parent: int, *, make: bool = True) -> Iterator[int]:
    """An open folder beneath `parent`. Raises NotOurs or OSError."""
    descriptor = open_folder(name, parent, make=make)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(name: str, parent: int) -> int | None:
    """A file for reading, None if there is none. Raises Damaged for what is no file of ours, or OSError."""
    try:
        # To look is no use: the time of the last one is the disk tier's to set.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOATIME | _FILE, dir_fd=parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise Damaged("it is a link, or no file") from error
        if error.errno in (errno.EPERM, errno.EACCES):
            raise Damaged("it belongs to another user") from error
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE:
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise Damaged("it is no regular file")
    if found.st_uid != os.geteuid():
        raise Damaged(f"it belongs to user {found.st_uid}")
    raise Damaged("others may write to it")


def make_file(name: str, parent: int) -> int:
    """A new file for reading and writing. Raises OSError."""
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=parent)


def names_in(descriptor: int) -> list[str]:
    """The names of what an open folder has."""
    with os.scandir(descriptor) as found:
        return [each.name for each in found]


def lock_at_once(descriptor: int, kind: int) -> bool:
    """Locks a file or folder as long as it is open, unless another has it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FolderLock:
    """The lock of a root, with the number of changes that were made under it by anybody."""

    def __init__(self, root: int) -> None:
        self._root = root

    @contextlib.contextmanager
    def __call__(self) -> Iterator[ChangeCount]:
        """Waits for the lock and holds it while the context is open. Raises OSError."""
        descriptor = os.open("lock", os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=self._root)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield ChangeCount(descriptor)
        finally:
            os.close(descriptor)


class ChangeCount:
    """A number in the lock's file; whoever finds another one than its own last looks at the folder again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, 8, 0), "little")

    def advance(self) -> int:
        """Before a change, so that one that is cut short by a death is seen as well."""
        count = (self.read() + 1) & 0xFFFFFFFFFFFFFFFF
        os.pwrite(self._descriptor, count.to_bytes(8, "little"), 0)
        return count
