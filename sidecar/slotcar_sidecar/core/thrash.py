"""Which adapters gave their slot to another a short time ago, so that one which comes back at once is noticed."""

from __future__ import annotations

from collections import OrderedDict

from slotcar_sidecar.core.ids import Digest

THRASH_SECONDS = 60.0
_MOST = 4096


class Evicted:
    """Invariant: at most `_MOST` digests, in the order in which they left; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._left_at: OrderedDict[Digest, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left_at)

    def leave(self, digest: Digest, now: float) -> None:
        """The digest gave its slot to another."""
        self._left_at.pop(digest, None)
        self._left_at[digest] = now
        while len(self._left_at) > _MOST or now - next(iter(self._left_at.values())) > THRASH_SECONDS:
            self._left_at.popitem(last=False)

    def come(self, digest: Digest, now: float) -> bool:
        """The digest is in a slot again; whether it left one within THRASH_SECONDS."""
        left_at = self._left_at.pop(digest, None)
        return left_at is not None and now - left_at <= THRASH_SECONDS
