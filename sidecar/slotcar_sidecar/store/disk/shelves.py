"""The entries by digest, on shelves: sha256/ab/abcd…, each a file of ours that is opened without following a link."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store.disk.entry import Damaged
from slotcar_sidecar.store.disk.ledger import Found
from slotcar_sidecar.store.disk.places import NotOurs, folder, names_in, open_file, open_folder

_HEX_LENGTH = 64
_HEX = frozenset("0123456789abcdef")
_SHELF = 2


class Version(NamedTuple):
    """What changes when the bytes of an entry do; a use changes it not."""

    device: int
    inode: int
    bytes: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Version:
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Shelves:
    """The entries of a root. Safe for threads: it has no state."""

    def __init__(self, root: int) -> None:
        self._entries = open_folder("sha256", root)

    def close(self) -> None:
        os.close(self._entries)

    @contextlib.contextmanager
    def entry(self, digest: Digest) -> Iterator[int | None]:
        """An entry, open for reading; None if there is none. Raises Damaged for what is no file of ours, or OSError."""
        name = name_of(digest)
        try:
            with folder(name[:_SHELF], self._entries, make=False) as shelf:
                descriptor = open_file(name, shelf)
        except FileNotFoundError:
            descriptor = None
        except NotOurs as error:
            raise Damaged(str(error)) from error
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def put(self, digest: Digest, name: str, parent: int) -> None:
        """Moves the file `name` of another folder to where the entry is; what was there is gone. Raises OSError."""
        with folder(name_of(digest)[:_SHELF], self._entries) as shelf:
            os.rename(name, name_of(digest), src_dir_fd=parent, dst_dir_fd=shelf)

    def sync(self, digest: Digest) -> None:
        """Waits until the disk knows which entries there are beside this one. Raises OSError."""
        with folder(name_of(digest)[:_SHELF], self._entries) as shelf:
            os.fsync(shelf)

    def remove(self, digest: Digest) -> None:
        """Removes an entry, if it is there. Raises OSError."""
        name = name_of(digest)
        with (
            contextlib.suppress(FileNotFoundError),
            folder(name[:_SHELF], self._entries, make=False) as shelf,
        ):
            os.unlink(name, dir_fd=shelf)

    def scan(self) -> Iterator[Found]:
        """Every entry, whatever it is worth. Raises OSError."""
        for shelf_name in names_in(self._entries):
            with folder(shelf_name, self._entries, make=False) as shelf, os.scandir(shelf) as files:
                for file in files:
                    found = file.stat(follow_symlinks=False)
                    if len(file.name) == _HEX_LENGTH and _HEX.issuperset(file.name) and stat.S_ISREG(found.st_mode):
                        yield Found(Digest(f"sha256:{file.name}"), found.st_size, found.st_atime_ns)


def name_of(digest: Digest) -> str:
    """An entry's file name."""
    return digest.value.removeprefix("sha256:")
