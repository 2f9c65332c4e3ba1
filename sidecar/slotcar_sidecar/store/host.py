"""Keeps verified adapters in memory up to a number of bytes; the least recently used give way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from slotcar_sidecar.core.errors import CapacityExceeded
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.ports import HostAdapter


class HostTierLru:
    """Invariant: `used_bytes` is the sum over the adapters, and at most `capacity_bytes`.

    `held` are digests that may not be dropped to make room; who has reason to hold them is not known here. Not safe for
    threads: only the cache's owner calls it.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._used_bytes = 0
        # The least recently used first.
        self._adapters: OrderedDict[Digest, HostAdapter] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def adapters(self) -> int:
        return len(self._adapters)

    def bytes_of(self, digests: Collection[Digest]) -> int:
        """Size of those of `digests` that are here, each counted once."""
        return sum(self._adapters[digest].adapter.bytes for digest in set(digests) if digest in self._adapters)

    def get(self, digest: Digest) -> HostAdapter | None:
        """The adapter, which becomes the most recently used, or None."""
        weights = self._adapters.get(digest)
        if weights is not None:
            self._adapters.move_to_end(digest)
        return weights

    def check(self, weights: HostAdapter, held: Collection[Digest] = ()) -> None:
        """Raises CapacityExceeded if the adapter is not here and cannot fit beside what is held."""
        if weights.adapter.digest in self._adapters:
            return
        size, held_bytes = weights.adapter.bytes, self.bytes_of(held)
        if size > self.capacity_bytes - held_bytes:
            beside = f", of which {held_bytes} may not be dropped" if held_bytes else ""
            raise CapacityExceeded(
                f"the adapter has {size} bytes, the host tier {self.capacity_bytes}{beside}",
                tier="HOST",
                found=size,
                wanted=f"at most {self.capacity_bytes - held_bytes}",
                held=held_bytes,
            )

    def put(self, weights: HostAdapter, held: Collection[Digest] = ()) -> tuple[Digest, ...]:
        """Stores an adapter as the most recently used and returns what was dropped for it, the oldest first.

        Raises what `check` raises, and drops nothing then.
        """
        digest, size = weights.adapter.digest, weights.adapter.bytes
        if self.get(digest) is not None:
            return ()
        self.check(weights, held)
        dropped = self._oldest_but(held, self._used_bytes + size - self.capacity_bytes)
        for oldest in dropped:
            self.drop(oldest)
        self._adapters[digest] = weights
        self._used_bytes += size
        return dropped

    def drop(self, digest: Digest) -> None:
        """Forgets an adapter, if it is there."""
        weights = self._adapters.pop(digest, None)
        if weights is not None:
            self._used_bytes -= weights.adapter.bytes

    def _oldest_but(self, held: Collection[Digest], wanted_bytes: int) -> tuple[Digest, ...]:
        """As few as have `wanted_bytes`, the least recently used first, none of them held."""
        kept, found = set(held), []
        for digest, weights in self._adapters.items():
            if wanted_bytes <= 0:
                break
            if digest not in kept:
                found.append(digest)
                wanted_bytes -= weights.adapter.bytes
        return tuple(found)

    def __contains__(self, digest: object) -> bool:
        return digest in self._adapters
