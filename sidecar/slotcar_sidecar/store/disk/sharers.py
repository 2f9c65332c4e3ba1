"""Which sidecars share the folder, and which adapters each of them needs there: a marked digest is not removed.

Each sidecar has a folder of its own with an empty file per digest, and a lock on that folder for as long as it lives;
what a dead one marked counts no more and is swept. Every call is made under the lock of the root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store.disk.places import folder, lock_at_once, names_in, open_folder
from slotcar_sidecar.store.disk.shelves import name_of

_FOLDER = "sidecars"
# The bytes are nowhere else: not even room for another adapter is a reason to remove them.
_ONLY = ".only"


class Sharers:
    """This sidecar among those that share a root."""

    def __init__(self, root: int, own: str) -> None:
        self._all = open_folder(_FOLDER, root)
        self._own = own
        self._descriptor = open_folder(own, self._all)
        if not lock_at_once(self._descriptor, fcntl.LOCK_EX):
            raise BlockingIOError(f"another process is {own}")
        self._marked: set[Digest] = set()
        self.only: set[Digest] = set()

    def mark(self, digest: Digest, *, only: bool) -> None:
        """This sidecar needs the entry; `only`: nothing else has its bytes."""
        if digest not in self._marked:
            self._touch(name_of(digest))
            self._marked.add(digest)
        if only and digest not in self.only:
            self._touch(name_of(digest) + _ONLY)
            self.only.add(digest)

    def unmark(self, digest: Digest) -> None:
        """This sidecar does not need the entry. Idempotent."""
        for name in (name_of(digest), name_of(digest) + _ONLY):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._descriptor)
        self._marked.discard(digest)
        self.only.discard(digest)

    def is_needed_by_others(self, digest: Digest, *, only: bool) -> bool:
        """Whether a live sidecar marked the entry; `only`: as what nothing else has."""
        name = name_of(digest) + _ONLY * only
        return any(_has(other, name) for other in self._others())

    def sweep(self) -> None:
        """Removes what dead sidecars left."""
        for _ in self._others():
            pass

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self._all)

    def _touch(self, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(name, flags, 0o600, dir_fd=self._descriptor))

    def _others(self) -> Iterator[int]:
        """The folders of the others that live; those of the dead go."""
        for name in names_in(self._all):
            if name == self._own:
                continue
            with folder(name, self._all, make=False) as descriptor:
                if lock_at_once(descriptor, fcntl.LOCK_SH):
                    self._bury(name, descriptor)
                else:
                    yield descriptor

    def _bury(self, name: str, descriptor: int) -> None:
        for mark in names_in(descriptor):
            os.unlink(mark, dir_fd=descriptor)
        os.rmdir(name, dir_fd=self._all)


def _has(descriptor: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
