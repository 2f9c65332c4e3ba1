"""The disk tier's folder: entries by digest, written whole or not at all, bounded by evicting the least recently used.

    sha256/ab/abcd…   an entry (see `entry`); its access time is its last use
    writing/          entries that are not whole yet, each locked by its writer
    sidecars/         what the sidecars that share the folder need (see `sharers`)
    lock              held for every change of the above, by anybody

Invariant: a file beneath sha256/ was complete, synced and read back before it got its name, and is verified again
before this process first believes it. A process may die between any two steps.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store.disk.entry import (
    Damaged,
    Piece,
    entry_bytes,
    holds_pieces,
    pieces_of,
    read_adapter,
    read_entry,
    write_pieces,
)
from slotcar_sidecar.store.disk.ledger import Changes, Found, Ledger
from slotcar_sidecar.store.disk.places import (
    ChangeCount,
    FolderLock,
    NotOurs,
    lock_at_once,
    make_file,
    names_in,
    open_file,
    open_folder,
    open_root,
)
from slotcar_sidecar.store.disk.sharers import Sharers
from slotcar_sidecar.store.disk.shelves import Shelves, Version, name_of
from slotcar_sidecar.store.weights import HostWeights


class Step(StrEnum):
    """The points between which a process may die, for tests that make it."""

    RESERVED = "reserved"
    WRITTEN = "written"
    VERIFIED = "verified"
    MARKED = "marked"
    NAMED = "named"
    STORED = "stored"
    EVICTING = "evicting"
    EVICTED = "evicted"
    FORGETTING = "forgetting"
    FORGOTTEN = "forgotten"


class Outcome(NamedTuple):
    """How a call ended: `result` is one word, `fault` says what went wrong, if anything did."""

    result: str
    changes: Changes
    fault: str = ""


class _Full(Exception):
    """There is no room, and none can be made."""


class DiskFolder:
    """Blocks. `read` is for any thread; everything else for one, which is always the same."""

    def __init__(
        self,
        root: int,
        own: str,
        capacity_bytes: int,
        wall_clock: Callable[[], float],
        reach: Callable[[Step], None],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._root = root
        self._wall_clock = wall_clock
        self._reach = reach
        self._own = own
        self._locked = FolderLock(root)
        self._ledger = Ledger()
        self._trusted: dict[Digest, Version] = {}
        self._count = -1
        self._shelves = Shelves(root)
        self._writing = open_folder("writing", root)
        with self._locked() as changes:
            self._sharers = Sharers(root, own)
            self._sharers.sweep()
            self._bytes_being_written()
            self._look(changes)

    @classmethod
    def open(
        cls,
        path: Path,
        own: str,
        capacity_bytes: int,
        wall_clock: Callable[[], float],
        reach: Callable[[Step], None] = lambda _: None,
    ) -> Self:
        """The folder at `path` for the sidecar `own`. Raises NotOurs for one that is not to be used, or OSError."""
        return cls(open_root(path), own, capacity_bytes, wall_clock, reach)

    def close(self) -> None:
        """Ends what this sidecar locked; what it needed is anybody's to remove."""
        self._sharers.close()
        self._shelves.close()
        os.close(self._writing)
        os.close(self._root)

    # Reading

    def read(self, digest: Digest) -> HostWeights | None:
        """The adapter, which becomes the most recently used; None if it is not there. Raises Damaged or OSError.

        Its bytes are verified the first time, and again when the file's identity, size or time of change is another.
        """
        with self._shelves.entry(digest) as descriptor:
            # An entry that is being evicted at this moment is not there any more.
            if descriptor is None or not lock_at_once(descriptor, fcntl.LOCK_SH):
                return None
            version = Version.of(descriptor)
            weights = read_entry(descriptor, digest, verify=self._trusted.get(digest) != version)
            if Version.of(descriptor) != version:
                raise Damaged("it changed while it was read")
            self._trusted[digest] = version
            with contextlib.suppress(OSError):  # a file system that is read-only by now
                os.utime(descriptor, ns=(self._now_ns(), version.modified_ns))
            return weights

    # Changes, in one thread

    def list(self) -> Outcome:
        """What is there now, as changes since the call before."""
        with self._locked() as changes:
            self._look(changes)
        return self._outcome("listed")

    def write(self, weights: HostWeights, *, only: bool) -> Outcome:
        """Stores an adapter, which this sidecar needs from now on; `only`: nothing else has its bytes.

        The result is "written", "present", "full" or "failed"; it never raises for what the disk does.
        """
        try:
            return self._outcome(self._write(weights, only=only))
        except _Full as error:
            return self._outcome("full", str(error))
        except OSError as error:
            return self._outcome("failed", f"cannot write: {error.strerror or error}")
        except (Damaged, NotOurs) as error:
            return self._outcome("failed", f"cannot write: {error}")

    def _write(self, weights: HostWeights, *, only: bool) -> str:
        digest = weights.adapter.digest
        pieces = pieces_of(weights, self._wall_clock())
        size = entry_bytes(pieces)
        with self._locked() as changes:
            self._look(changes)
            if self._is_stored(digest, sure=only):
                self._sharers.mark(digest, only=only)
                self._use(digest)
                return "present"
            self._make_room(size, changes)
            descriptor = self._reserve(digest, size)
        try:
            self._reach(Step.RESERVED)
            self._fill(descriptor, pieces)
            with self._locked() as changes:
                self._look(changes)
                self._publish(digest, descriptor, only, changes)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary(digest), dir_fd=self._writing)
            raise
        finally:
            os.close(descriptor)
        self._reach(Step.STORED)
        return "written"

    def remove(self, digest: Digest) -> Outcome:
        """This sidecar does not need the entry; it goes if no other one does, and nobody reads it now."""
        try:
            with self._locked() as changes:
                self._look(changes)
                self._sharers.unmark(digest)
                if digest in self._ledger and not self._sharers.is_needed_by_others(digest, only=False):
                    self._reach(Step.FORGETTING)
                    self._unlink(digest, "forgotten", changes)
                    self._reach(Step.FORGOTTEN)
        except (OSError, NotOurs, Damaged) as error:
            return self._outcome("failed", f"cannot remove: {error}")
        return self._outcome("removed")

    def discard(self, digest: Digest) -> Outcome:
        """Removes an entry that was found damaged, unless it has been replaced by a good one."""
        try:
            with self._locked() as changes:
                self._look(changes)
                try:
                    if self.read(digest) is not None:
                        return self._outcome("replaced")
                except Damaged:
                    self._trusted.pop(digest, None)
                    self._count = changes.advance()
                    self._shelves.remove(digest)
                self._ledger.remove(digest, "damaged")
        except (OSError, NotOurs) as error:
            return self._outcome("failed", f"cannot remove: {error}")
        return self._outcome("removed")

    def touch(self, digests: Collection[Digest]) -> Outcome:
        """These were used, wherever their bytes were then."""
        with contextlib.suppress(OSError, NotOurs, Damaged):
            for digest in digests:
                if digest in self._ledger:
                    self._use(digest)
        return self._outcome("touched")

    def adopt(self, wanted: Mapping[Digest, bool]) -> tuple[Mapping[Digest, Adapter], Outcome]:
        """Of the wanted digests those that are there, with what their entries say; this sidecar needs them from now on.

        The value of `wanted` says whether nothing else has the bytes.
        """
        found: dict[Digest, Adapter] = {}
        try:
            with self._locked() as changes:
                self._look(changes)
                for digest, only in wanted.items():
                    adapter = self._described(digest)
                    if adapter is not None:
                        self._sharers.mark(digest, only=only)
                        found[digest] = adapter
        except (OSError, NotOurs) as error:
            return found, self._outcome("failed", f"cannot adopt: {error}")
        return found, self._outcome("adopted")

    def _described(self, digest: Digest) -> Adapter | None:
        """What an entry says of itself; a damaged one is found so by whoever reads it."""
        with contextlib.suppress(Damaged), self._shelves.entry(digest) as descriptor:
            return None if descriptor is None else read_adapter(descriptor, digest)
        return None

    # Steps, under the lock

    def _look(self, changes: ChangeCount) -> None:
        """Brings the ledger up to date if anybody else changed anything."""
        count = changes.read()
        if count != self._count:
            self._ledger.replace(self._shelves.scan())
            self._count = count

    def _is_stored(self, digest: Digest, *, sure: bool) -> bool:
        """Whether the entry is there; `sure`: and has been verified by this process."""
        if digest not in self._ledger:
            return False
        with contextlib.suppress(Damaged), self._shelves.entry(digest) as descriptor:
            if descriptor is not None:
                return not sure or self._trusted.get(digest) == Version.of(descriptor)
        return False

    def _make_room(self, size: int, changes: ChangeCount) -> None:
        """Evicts until `size` bytes fit. Raises _Full."""
        stuck = self._ledger.bytes_of(self._sharers.only)
        if size + stuck > self.capacity_bytes:
            raise _Full(f"{size} bytes do not fit into {self.capacity_bytes}, of which {stuck} may not be dropped")
        needed = size + self._bytes_being_written()
        # Twice, as what was used meanwhile is passed over once, and may be all there is.
        for found in chain.from_iterable(self._ledger.oldest() for _ in range(2)):
            if self._ledger.used_bytes + needed <= self.capacity_bytes:
                return
            if not self._was_used_elsewhere(found) and not self._is_only_copy(found.digest):
                self._reach(Step.EVICTING)
                self._unlink(found.digest, "evicted", changes)
                self._reach(Step.EVICTED)
        if self._ledger.used_bytes + needed > self.capacity_bytes:
            raise _Full(f"no room for {size} bytes can be made: what is there is read, or needed and nowhere else")

    def _is_only_copy(self, digest: Digest) -> bool:
        return digest in self._sharers.only or self._sharers.is_needed_by_others(digest, only=True)

    def _was_used_elsewhere(self, found: Found) -> bool:
        """Whether a read, or another sidecar, used the entry since the ledger learnt; it is no longer the oldest."""
        used_ns = 0
        with contextlib.suppress(Damaged), self._shelves.entry(found.digest) as descriptor:
            used_ns = os.fstat(descriptor).st_atime_ns if descriptor is not None else 0
        if used_ns > found.used_ns:
            self._ledger.touch(found.digest, used_ns)
        return used_ns > found.used_ns

    def _unlink(self, digest: Digest, why: str, changes: ChangeCount) -> None:
        """Removes an entry, unless somebody reads it."""
        with contextlib.suppress(Damaged), self._shelves.entry(digest) as descriptor:
            if descriptor is not None and not lock_at_once(descriptor, fcntl.LOCK_EX):
                return
        self._count = changes.advance()
        self._shelves.remove(digest)
        self._trusted.pop(digest, None)
        self._ledger.remove(digest, why)

    def _reserve(self, digest: Digest, size: int) -> int:
        """A locked file of `size` bytes, so that a disk that is full says so now. Raises OSError."""
        descriptor = make_file(self._temporary(digest), self._writing)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(descriptor, 0, size)
        except BaseException:
            os.close(descriptor)
            os.unlink(self._temporary(digest), dir_fd=self._writing)
            raise
        return descriptor

    def _publish(self, digest: Digest, descriptor: int, only: bool, changes: ChangeCount) -> None:
        """Gives a file that is whole its name."""
        self._sharers.mark(digest, only=only)
        self._reach(Step.MARKED)
        self._count = changes.advance()
        self._shelves.put(digest, self._temporary(digest), self._writing)
        self._reach(Step.NAMED)
        self._shelves.sync(digest)
        version, now_ns = Version.of(descriptor), self._now_ns()
        os.utime(descriptor, ns=(now_ns, version.modified_ns))
        self._trusted[digest] = version
        self._ledger.add(Found(digest, version.bytes, now_ns))

    def _bytes_being_written(self) -> int:
        """Size of the files that their writers have not finished; those of the dead are removed."""
        size = 0
        for name in names_in(self._writing):
            descriptor = open_file(name, self._writing)
            if descriptor is None:
                continue
            try:
                if lock_at_once(descriptor, fcntl.LOCK_EX):
                    os.unlink(name, dir_fd=self._writing)
                else:
                    size += os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
        return size

    # Steps without it

    def _fill(self, descriptor: int, pieces: tuple[Piece, ...]) -> None:
        write_pieces(descriptor, pieces)
        self._reach(Step.WRITTEN)
        if not holds_pieces(descriptor, pieces):
            raise OSError(errno.EIO, "the disk gives back other bytes than it was given")
        self._reach(Step.VERIFIED)

    def _use(self, digest: Digest) -> None:
        now_ns = self._now_ns()
        with self._shelves.entry(digest) as descriptor:
            if descriptor is not None:
                os.utime(descriptor, ns=(now_ns, os.fstat(descriptor).st_mtime_ns))
        self._ledger.touch(digest, now_ns)

    def _temporary(self, digest: Digest) -> str:
        return f"{name_of(digest)}.{self._own}"

    def _now_ns(self) -> int:
        return int(self._wall_clock() * 1e9)

    def _outcome(self, result: str, fault: str = "") -> Outcome:
        return Outcome(result, self._ledger.take_changes(), fault)
