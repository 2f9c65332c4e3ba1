"""What is in the disk tier: sizes in order of last use, and what changed since the owner of the process last heard.

Invariant: `used_bytes` is the sum of the sizes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slotcar_sidecar.core.ids import Digest


class Found(NamedTuple):
    """An entry as its folder has it."""

    digest: Digest
    bytes: int
    used_ns: int


class Changes(NamedTuple):
    """Entries that came, with their sizes, and that went, each with why."""

    came: Mapping[Digest, int]
    went: Mapping[Digest, str]


class Ledger:
    """One process's view of the folder. Not safe for threads."""

    def __init__(self) -> None:
        # The least recently used first.
        self._entries: OrderedDict[Digest, Found] = OrderedDict()
        self._came: dict[Digest, int] = {}
        self._went: dict[Digest, str] = {}
        self.used_bytes = 0

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries

    def oldest(self) -> tuple[Found, ...]:
        """Every entry, the least recently used first."""
        return tuple(sorted(self._entries.values(), key=lambda each: each.used_ns))

    def bytes_of(self, digests: Iterable[Digest]) -> int:
        return sum(self._entries[digest].bytes for digest in digests if digest in self._entries)

    def add(self, found: Found) -> None:
        """An entry came, or its bytes were replaced; it is the most recently used."""
        self._forget(found.digest)
        self._entries[found.digest] = found
        self.used_bytes += found.bytes
        self._went.pop(found.digest, None)
        self._came[found.digest] = found.bytes

    def remove(self, digest: Digest, why: str) -> None:
        """An entry went, if it was there."""
        if self._forget(digest):
            self._came.pop(digest, None)
            self._went[digest] = why

    def touch(self, digest: Digest, used_ns: int) -> None:
        """The entry, if it is there, is the most recently used."""
        if digest in self._entries:
            self._entries[digest] = self._entries[digest]._replace(used_ns=used_ns)
            self._entries.move_to_end(digest)

    def replace(self, found: Iterable[Found]) -> None:
        """What the folder really has; the difference is a change that others made."""
        now = {each.digest: each for each in sorted(found, key=lambda each: (each.used_ns, each.digest))}
        for digest in [digest for digest in self._entries if digest not in now]:
            self.remove(digest, "elsewhere")
        for each in now.values():
            if each.digest in self._entries and self._entries[each.digest].bytes == each.bytes:
                self.touch(each.digest, each.used_ns)
            else:
                self.add(each)

    def take_changes(self) -> Changes:
        """What came and went since the last call."""
        changes = Changes(self._came, self._went)
        self._came, self._went = {}, {}
        return changes

    def _forget(self, digest: Digest) -> bool:
        found = self._entries.pop(digest, None)
        if found is not None:
            self.used_bytes -= found.bytes
        return found is not None
