"""Keeps verified adapters in memory up to a number of bytes; the least recently used give way."""

from __future__ import annotations

from collections import OrderedDict

from slotcar_sidecar.core.errors import CapacityExceeded
from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.ports import HostAdapter


class HostTierLru:
    """Invariant: `used_bytes` is the sum over what is held, and at most `capacity_bytes`.

    Not safe for threads: only the cache's owner calls it.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._held: OrderedDict[Digest, HostAdapter] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def get(self, digest: Digest) -> HostAdapter | None:
        """The adapter, which becomes the most recently used, or None."""
        weights = self._held.get(digest)
        if weights is not None:
            self._held.move_to_end(digest)
        return weights

    def check(self, weights: HostAdapter) -> None:
        """Raises CapacityExceeded if the adapter can never fit."""
        size = weights.adapter.bytes
        if size > self.capacity_bytes:
            raise CapacityExceeded(
                f"the adapter has {size} bytes, the host tier {self.capacity_bytes}",
                tier="HOST",
                found=size,
                wanted=f"at most {self.capacity_bytes}",
            )

    def put(self, weights: HostAdapter) -> tuple[Digest, ...]:
        """Stores an adapter as the most recently used and returns what was dropped for it, the oldest first.

        Raises what `check` raises, and drops nothing then.
        """
        digest, size = weights.adapter.digest, weights.adapter.bytes
        if self.get(digest) is not None:
            return ()
        self.check(weights)
        dropped = []
        while self._used_bytes + size > self.capacity_bytes:
            oldest = next(iter(self._held))
            self.drop(oldest)
            dropped.append(oldest)
        self._held[digest] = weights
        self._used_bytes += size
        return tuple(dropped)

    def drop(self, digest: Digest) -> None:
        """Forgets an adapter, if it is there."""
        weights = self._held.pop(digest, None)
        if weights is not None:
            self._used_bytes -= weights.adapter.bytes

    def __contains__(self, digest: object) -> bool:
        return digest in self._held
