"""Holds: sessions keep adapters from leaving, once their bytes, and where it is reserved their slots, are there."""

from __future__ import annotations

import contextlib

from slotcar_sidecar.cache.loads import Loads
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.errors import ModelUnknown, SlotsExhausted
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.holds import Hold, HoldTerms
from slotcar_sidecar.core.ids import AdapterRef, Digest, SessionId
from slotcar_sidecar.core.pins import HoldOwner
from slotcar_sidecar.core.slots import Claim


class SessionHolds:
    """Takes and ends the holds of sessions."""

    def __init__(self, state: State, loads: Loads) -> None:
        self._state = state
        self._loads = loads

    async def hold(self, terms: HoldTerms, ref: AdapterRef) -> Hold:
        """Keeps the adapter's bytes, and its slot if it is asked for and reserved, from leaving.

        One step when all of it is there; else what is missing is loaded first. A hold that is released before it takes
        effect, or whose caller goes away, is none.
        """
        with self._state.pending_hold(terms.owner) as token:
            while True:
                wanted, digest = self._resolve(terms, ref)
                hold = self._hold_now(terms, wanted, digest)
                hold = hold or await self._state.outliving(self._load_and_hold(terms, wanted, ref, token))
                if hold is not None:
                    return hold

    def _resolve(self, terms: HoldTerms, ref: AdapterRef) -> tuple[AdapterRef, Digest]:
        self._state.check_hold(terms.owner)
        (wanted,) = self._state.residency.resolve(Folded.of((ref,)), terms.owner.session)
        assert wanted is not None
        assert wanted.digest is not None
        return wanted, wanted.digest

    def _hold_now(self, terms: HoldTerms, wanted: AdapterRef, digest: Digest) -> Hold | None:
        """The hold, if all that it keeps is there."""
        state, residency = self._state, self._state.residency
        needs_slot = terms.slot and residency.may_hold_slot(terms.owner, digest)
        if state.tiers.from_host(digest) is None or (needs_slot and residency.readable_slot(digest) is None):
            return None
        hold = residency.hold(terms, wanted, state.now())
        state.publish()
        return hold

    async def _load_and_hold(self, terms: HoldTerms, wanted: AdapterRef, ref: AdapterRef, token: object) -> Hold | None:
        """The hold; None when the name has moved meanwhile."""
        state, residency, session = self._state, self._state.residency, terms.owner.session
        claims = [Claim(session, slot=False, bytes=True), Claim(session)]
        digest = wanted.digest
        assert digest is not None
        residency.claim(digest, claims[0])
        try:
            weights = await self._loads.bytes_of(wanted)
            if terms.slot and residency.may_hold_slot(terms.owner, digest):
                with contextlib.suppress(SlotsExhausted, ModelUnknown):  # then the bytes alone are held
                    await self._loads.make_resident(weights, wanted.name, claims[1])
            if not state.is_pending(terms.owner, token):
                return Hold(terms.owner, wanted, digest, False, state.now())
            again, _ = self._resolve(terms, ref)
            if again != wanted:
                return None
            return residency.hold(terms, wanted, state.now())
        finally:
            for claim in claims:
                residency.unclaim(digest, claim)
            state.publish()

    def release(self, session_id: SessionId, hold_id: int) -> None:
        """Ends a hold, also one on its way. Idempotent."""
        owner = HoldOwner(session_id, hold_id)
        self._state.sessions.get(session_id)
        self._state.withdraw_holds(owner)
        self._state.residency.release_hold(owner, "released")
        self._state.publish()

    def expire(self) -> None:
        """Ends the holds whose time is over."""
        expired = self._state.residency.holds.expired(self._state.now())
        for hold in expired:
            self._state.residency.release_hold(hold.owner, "its time is over")
        if expired:
            self._state.publish()
