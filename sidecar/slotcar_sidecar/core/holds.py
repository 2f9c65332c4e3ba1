"""Holds: sessions keep digests from leaving until they release them, their time is over, or the session ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slotcar_sidecar.core.errors import RequestInvalid
from slotcar_sidecar.core.ids import AdapterRef, Digest, SessionId
from slotcar_sidecar.core.pins import HoldOwner

MAX_HOLD_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class HoldTerms:
    """What a caller asks for: `seconds` None lasts until released; `slot` also keeps the slot, if that can be."""

    owner: HoldOwner
    seconds: float | None
    slot: bool

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds <= MAX_HOLD_SECONDS:
            wanted = f"more than 0 and at most {MAX_HOLD_SECONDS:g} seconds"
            raise RequestInvalid("duration", found=self.seconds, wanted=wanted)


@dataclass(frozen=True, slots=True)
class Hold:
    """One hold. `ref` has the digest; `expires_at` is None for one that lasts until it is released.

    The time runs from the moment at which the hold took effect, so that a slow load does not eat it up.
    """

    owner: HoldOwner
    ref: AdapterRef
    digest: Digest
    slot: bool
    expires_at: float | None


class Holds:
    """All holds, by owner and by digest."""

    def __init__(self) -> None:
        self._holds: dict[HoldOwner, Hold] = {}
        self._by_digest: dict[Digest, set[HoldOwner]] = {}
        self._by_session: dict[SessionId, dict[int, Hold]] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        return iter(tuple(self._holds.values()))

    def get(self, owner: HoldOwner) -> Hold | None:
        return self._holds.get(owner)

    def of(self, digest: Digest) -> frozenset[HoldOwner]:
        """Who holds the digest."""
        return frozenset(self._by_digest.get(digest, ()))

    def of_session(self, session: SessionId) -> tuple[Hold, ...]:
        """The session's holds, by id."""
        return tuple(hold for _, hold in sorted(self._by_session.get(session, {}).items()))

    def count(self, session: SessionId) -> int:
        """How many holds the session has."""
        return len(self._by_session.get(session, ()))

    def is_held(self, digest: Digest) -> bool:
        return digest in self._by_digest

    def digests(self) -> frozenset[Digest]:
        return frozenset(self._by_digest)

    def put(self, hold: Hold) -> None:
        """Adds a hold; the one that its owner had is gone."""
        self.remove(hold.owner)
        self._holds[hold.owner] = hold
        self._by_digest.setdefault(hold.digest, set()).add(hold.owner)
        self._by_session.setdefault(hold.owner.session, {})[hold.owner.hold_id] = hold

    def remove(self, owner: HoldOwner) -> Hold | None:
        """Removes the owner's hold and returns it, None if there is none."""
        hold = self._holds.pop(owner, None)
        if hold is not None:
            owners = self._by_digest[hold.digest]
            owners.discard(owner)
            if not owners:
                del self._by_digest[hold.digest]
            mine = self._by_session[owner.session]
            del mine[owner.hold_id]
            if not mine:
                del self._by_session[owner.session]
        return hold

    def expired(self, now: float) -> list[Hold]:
        """The holds whose time is over."""
        return [hold for hold in self._holds.values() if hold.expires_at is not None and hold.expires_at <= now]
