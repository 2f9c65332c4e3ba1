"""A folder of the disk tier without files, whose entries a test may damage, lose or refuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.store.disk.entry import Damaged
from slotcar_sidecar.store.disk.folder import Outcome
from slotcar_sidecar.store.disk.ledger import Changes


class FakeFolder:
    """Implements store.disk.tier.Folder; it outlives the process, of whose needs nothing is left then."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        # The least recently used first.
        self.entries: OrderedDict[Digest, Any] = OrderedDict()
        self.needed: dict[Digest, bool] = {}
        self.damaged: set[Digest] = set()
        self.is_full = False
        self._came: dict[Digest, int] = {}
        self._went: dict[Digest, str] = {}

    def begin_life(self) -> None:
        """The sidecar that had it is dead."""
        self.needed.clear()
        self._came, self._went = {digest: each.adapter.bytes for digest, each in self.entries.items()}, {}

    @property
    def used_bytes(self) -> int:
        return sum(weights.adapter.bytes for weights in self.entries.values())

    def read(self, digest: Digest) -> Any:
        if digest in self.damaged:
            raise Damaged("a test did it")
        if digest in self.entries:
            self.entries.move_to_end(digest)
        return self.entries.get(digest)

    def list(self) -> Outcome:
        return self._outcome("listed")

    def write(self, weights: Any, *, only: bool) -> Outcome:
        digest = weights.adapter.digest
        present = digest in self.entries and digest not in self.damaged
        if not present and (self.is_full or not self._make_room(weights.adapter.bytes)):
            return self._outcome("full", "the disk is full")
        self.entries[digest] = weights
        self.entries.move_to_end(digest)
        self.damaged.discard(digest)
        self.needed[digest] = only or self.needed.get(digest, False)
        self._came[digest] = weights.adapter.bytes
        return self._outcome("present" if present else "written")

    def _make_room(self, size: int) -> bool:
        for digest in tuple(self.entries):
            if self.used_bytes + size > self.capacity_bytes and not self.needed.get(digest, False):
                self.lose(digest, "evicted")
        return self.used_bytes + size <= self.capacity_bytes

    def lose(self, digest: Digest, why: str = "elsewhere") -> None:
        """The entry goes."""
        if self.entries.pop(digest, None) is not None:
            self.damaged.discard(digest)
            self._came.pop(digest, None)
            self._went[digest] = why

    def remove(self, digest: Digest) -> Outcome:
        self.needed.pop(digest, None)
        self.lose(digest, "forgotten")
        return self._outcome("removed")

    def discard(self, digest: Digest) -> Outcome:
        if digest in self.damaged:
            self.lose(digest, "damaged")
        return self._outcome("removed")

    def touch(self, digests: Collection[Digest]) -> Outcome:
        for digest in digests:
            if digest in self.entries:
                self.entries.move_to_end(digest)
        return self._outcome("touched")

    def adopt(self, wanted: Mapping[Digest, bool]) -> tuple[Mapping[Digest, Adapter], Outcome]:
        found = {digest: self.entries[digest].adapter for digest in wanted if digest in self.entries}
        self.needed |= {digest: wanted[digest] for digest in found}
        return found, self._outcome("adopted")

    def _outcome(self, result: str, fault: str = "") -> Outcome:
        changes = Changes(self._came, self._went)
        self._came, self._went = {}, {}
        return Outcome(result, changes, fault)
