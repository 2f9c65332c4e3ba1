"""Names: which digest each has now and had before, where it is loaded from, and whether an operator keeps it.

Invariant: a digest is known as a name from the moment that the name had it until the digest is forgotten.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.errors import AdapterConflict, AdapterNotFound, CapacityExceeded
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest
from slotcar_sidecar.core.journal import NamesCopy

_MAX_HISTORY = 16


class Names:
    """One table; it knows nothing of slots."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._digests: dict[AdapterName, Digest] = {}
        self._sources: dict[AdapterName, str] = {}
        self._by_digest: dict[Digest, set[AdapterName]] = {}
        self._known_as: dict[Digest, set[AdapterName]] = {}
        self._adapters: dict[Digest, Adapter] = {}
        self._without_source: set[Digest] = set()
        self._kept: set[AdapterName] = set()
        self._history: dict[AdapterName, tuple[Digest, ...]] = {}
        # Grows with each change that a restart would have to bring back.
        self.changes = 0

    @property
    def capacity(self) -> int:
        return self._max_names

    @property
    def kept(self) -> frozenset[AdapterName]:
        """The names that an operator keeps."""
        return frozenset(self._kept)

    @property
    def kept_digests(self) -> set[Digest]:
        return {self._digests[name] for name in self._kept}

    def __len__(self) -> int:
        return len(self._digests)

    def __iter__(self) -> Iterator[AdapterName]:
        """Every name, in order."""
        return iter(sorted(self._digests))

    def first(self, most: int) -> list[AdapterName]:
        """So many of the names at most, those that come first in their order."""
        return heapq.nsmallest(most, self._digests, key=lambda name: name.value)

    # Look-ups

    def get(self, name: AdapterName) -> Digest | None:
        """The digest that the name has now, None for an unknown name."""
        return self._digests.get(name)

    def digest_of(self, ref: AdapterRef) -> Digest:
        """The digest that the name has now. Raises AdapterNotFound, also when `ref` says another digest."""
        digest = self._digests.get(ref.name)
        if digest is None or ref.digest not in (None, digest):
            raise AdapterNotFound(ref)
        return digest

    def history(self, name: AdapterName) -> tuple[Digest, ...]:
        """The digests that the name had before, the latest first; only the last few."""
        return self._history.get(name, ())

    def copy(self) -> NamesCopy:
        """The table as it is now."""
        return NamesCopy(dict(self._digests), dict(self._sources), frozenset(self._kept), dict(self._history))

    def named(self, digest: Digest) -> frozenset[AdapterName]:
        """The names that have the digest now."""
        return frozenset(self._by_digest.get(digest, ()))

    def is_named(self, digest: Digest) -> bool:
        return digest in self._by_digest

    def is_kept(self, name: AdapterName) -> bool:
        return name in self._kept

    def was_known_as(self, ref: AdapterRef) -> bool:
        """Whether the ref's name ever had the ref's digest, which is not forgotten yet."""
        return ref.digest is not None and ref.name in self._known_as.get(ref.digest, ())

    def known_as(self, digest: Digest) -> frozenset[AdapterName]:
        """The names that have or had the digest, which is not forgotten yet."""
        return frozenset(self._known_as.get(digest, ()))

    def adapter(self, digest: Digest) -> Adapter:
        """The adapter with a digest that is not forgotten."""
        return self._adapters[digest]

    def find(self, digest: Digest) -> Adapter | None:
        """The same, None for a digest that is not known."""
        return self._adapters.get(digest)

    def source_of(self, ref: AdapterRef) -> str:
        """Where to load from again what the ref says, empty for what was uploaded. Raises AdapterNotFound."""
        if ref.name in self._digests and ref.digest in (None, self._digests[ref.name]):
            return self._sources[ref.name] or self._adapters[self._digests[ref.name]].source
        if ref.digest is not None and ref.digest in self._adapters:
            return self._adapters[ref.digest].source
        raise AdapterNotFound(ref)

    def without_source(self) -> frozenset[Digest]:
        """Digests that could not be read again: their bytes must stay."""
        return frozenset(self._without_source)

    def is_without_source(self, digest: Digest) -> bool:
        return digest in self._without_source

    # Changes

    def check_room(self, name: AdapterName) -> None:
        """Raises CapacityExceeded when there is no room for one more name."""
        if name not in self._digests and len(self) >= self._max_names:
            raise CapacityExceeded(
                f"the server has {self._max_names} adapters already: unload one",
                found=len(self),
                wanted=self._max_names,
            )

    def check_conflict(self, name: AdapterName, digest: Digest) -> None:
        """Raises AdapterConflict when the name has another digest."""
        found = self._digests.get(name, digest)
        if found != digest:
            raise AdapterConflict(name, found=found, wanted=digest)

    def bind(self, name: AdapterName, adapter: Adapter, source: str | None) -> Digest | None:
        """The name has the adapter from now on; returns the digest that it had before, if that was another.

        `source` is where it is loaded from again; by default where it was, or where these bytes were read.
        """
        digest, before = adapter.digest, self._digests.get(name)
        known = self._sources.get(name) if before == digest else None
        self.changes += 1
        if before is not None and before != digest:
            self._unname(before, name)
            self.recall(name, (before, *self.history(name)))
        self._digests[name] = digest
        self._by_digest.setdefault(digest, set()).add(name)
        self._known_as.setdefault(digest, set()).add(name)
        self._adapters[digest] = adapter if adapter.source else self._adapters.get(digest, adapter)
        self._sources[name] = source or known or self._adapters[digest].source
        if self._adapters[digest].source:
            self._without_source.discard(digest)
        else:
            self._without_source.add(digest)
        return before if before != digest else None

    def recall(self, name: AdapterName, history: Sequence[Digest]) -> None:
        """The name had these digests before, the latest first."""
        if history:
            self._history[name] = tuple(history[:_MAX_HISTORY])

    def unbind(self, name: AdapterName) -> None:
        """The name, its history and its keep are gone."""
        self.changes += 1
        self._history.pop(name, None)
        self._unname(self._digests.pop(name), name)
        del self._sources[name]
        self._kept.discard(name)

    def keep(self, name: AdapterName) -> bool:
        """Keeps a name that there is; False if it was kept already."""
        before = len(self._kept)
        self.changes += 1
        self._kept.add(name)
        return len(self._kept) > before

    def release_keep(self, name: AdapterName) -> bool:
        """Ends a keep; False if there was none."""
        before = len(self._kept)
        self.changes += 1
        self._kept.discard(name)
        return len(self._kept) < before

    def forget_alias(self, name: AdapterName, digest: Digest) -> None:
        """Nobody will ask for the digest by a name that it has no more."""
        if self._digests.get(name) != digest and digest in self._known_as:
            self._known_as[digest].discard(name)

    def forget(self, digest: Digest) -> bool:
        """Nothing refers to the digest any more; False if it was not known."""
        self._known_as.pop(digest, None)
        self._without_source.discard(digest)
        return self._adapters.pop(digest, None) is not None

    def _unname(self, digest: Digest, name: AdapterName) -> None:
        names = self._by_digest[digest]
        names.discard(name)
        if not names:
            del self._by_digest[digest]

    def check_integrity(self) -> None:
        """Asserts the invariants of this table."""
        assert self._sources.keys() == self._digests.keys()
        assert self._kept <= self._digests.keys()
        assert self._history.keys() <= self._digests.keys()
        for name, digest in self._digests.items():
            assert digest in self._adapters, name
            assert name in self._by_digest[digest], name
            assert name in self._known_as[digest], name
        assert {name for names in self._by_digest.values() for name in names} == self._digests.keys()
        assert self._known_as.keys() == self._adapters.keys()
        assert self._without_source == {digest for digest, each in self._adapters.items() if not each.source}
