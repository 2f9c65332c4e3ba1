"""Mappings and holds: what sessions pin, at once or in their turn, and for how long.

A call that waits for slots holds nothing meanwhile, also not the pins of the mapping that it replaces, so that no two
of them can wait for each other; who waits first is served first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from slotcar_sidecar.cache.loads import Loads
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.calls import MappingCall
from slotcar_sidecar.core.errors import (
    AdapterNotResident,
    CapacityExceeded,
    MappingNotFound,
    ModelUnknown,
    RequestInvalid,
    ShuttingDown,
    SlotsExhausted,
)
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.holds import Hold, HoldTerms
from slotcar_sidecar.core.ids import AdapterRef, Digest, SessionId
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.pins import HoldOwner, MappingOwner
from slotcar_sidecar.core.ports import HostAdapter
from slotcar_sidecar.core.session import Session
from slotcar_sidecar.core.slots import Claim

_MAX_WAITING = 1024

Wanted = Sequence[AdapterRef | None]


@dataclass(slots=True, eq=False)
class _Place:
    """A call in the queue; it looks again whenever it is woken."""

    owner: MappingOwner
    deadline: float
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class Mappings:
    """Sets, renews and ends what sessions pin."""

    def __init__(self, state: State, loads: Loads) -> None:
        self._state = state
        self._loads = loads
        self._calls: dict[object, MappingCall] = {}
        self._waiting: dict[object, _Place] = {}
        state.listeners.append(self._wake_first)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def set(self, call: MappingCall) -> Mapping:
        """Resolves and pins in one step, all or nothing; with `load`, what is in no slot is made resident first."""
        state, turn = self._state, object()
        self._check(call)
        deadline = state.now() + call.wait_seconds
        self._calls[turn] = call
        try:
            while True:
                if turn not in self._calls:
                    raise MappingNotFound(call.mapping_id)
                try:
                    mapping = self._set_now(call, turn)
                    if mapping is None:
                        mapping = await state.outliving(self._load_and_set(call, turn))
                    if mapping is not None:
                        return mapping
                except SlotsExhausted as error:
                    if error.retry_after_seconds is None or state.now() >= deadline:
                        raise
                    await self._wait(call, turn, deadline)
        finally:
            self._calls.pop(turn, None)
            if self._waiting.pop(turn, None):
                state.residency.slots.queue.remove(turn)
                self._pin_again(call.owner)
                state.publish()

    def _pin_again(self, owner: MappingOwner) -> None:
        """The mapping that was to be replaced takes its pins again, if it still is one and may."""
        session = self._state.sessions.peek(owner.session)
        mapping = session.mappings.get(owner.mapping_id) if session else None
        if mapping is not None and self._state.layout.is_current(mapping.slots, mapping.generation):
            self._renew(owner, mapping)

    def _withdraw(self, owner: MappingOwner, unless: Wanted | None = None) -> None:
        """Calls under way for the owner end without effect: their mapping is released, or was set otherwise now."""
        for turn, call in tuple(self._calls.items()):
            if call.owner == owner and call.refs != unless:
                del self._calls[turn]
                self._wake(turn)

    def wake_session(self, session_id: SessionId) -> None:
        """The session is gone: its calls that wait find that out."""
        for turn, place in self._waiting.items():
            if place.owner.session == session_id:
                self._wake(turn)

    def _wake(self, turn: object) -> None:
        if turn in self._waiting:
            self._waiting[turn].woken.set()

    def _wake_first(self) -> None:
        """Something changed: the call whose turn it is looks again; all of them, when the server closes."""
        queue = self._state.residency.slots.queue
        for turn in queue if self._state.closing.is_set() else tuple(queue)[:1]:
            self._wake(turn)

    def _check(self, call: MappingCall) -> Session:
        session = self._state.sessions.get(call.session)
        self._state.limits.check_entries("entries", len(call.refs))
        self._state.sessions.check_room(session, call.mapping_id)
        if session.terms.ranks > 1:
            for index, ref in enumerate(call.refs):
                if ref is not None and ref.digest is None:
                    wanted = f"name@sha256:…, as the session has {session.terms.ranks} ranks"
                    raise RequestInvalid(f"entries[{index}].ref", found=str(ref), wanted=wanted)
        return session

    async def _wait(self, call: MappingCall, turn: object, deadline: float) -> None:
        """Takes a place in the queue and waits for its turn; what the mapping of before pinned is free meanwhile."""
        state = self._state
        if turn not in self._waiting:
            if len(self._waiting) >= _MAX_WAITING:
                raise CapacityExceeded("too many calls wait", found=len(self._waiting), wanted=_MAX_WAITING)
            self._waiting[turn] = _Place(call.owner, deadline)
            state.residency.slots.queue.append(turn)
            if state.residency.pins.by(call.owner):
                state.residency.release(call.owner)
                state.publish()
        await self._waiting[turn].woken.wait()
        self._waiting[turn].woken.clear()
        if state.closing.is_set():
            raise ShuttingDown

    def _set_now(self, call: MappingCall, turn: object) -> Mapping | None:
        """The mapping, if its adapters are in slots; None when they must be loaded first."""
        residency, session = self._state.residency, self._check(call)
        recorded = self._recorded(session, call)
        if recorded is not None:
            return recorded
        wanted = residency.resolve(call.refs, call.session)
        absent = residency.absent(wanted)
        if absent and not call.load:
            digests = {ref.digest for ref in absent}
            asked = zip(call.refs, wanted, strict=True)
            raise AdapterNotResident(*dict.fromkeys(ref for ref, found in asked if found and found.digest in digests))
        if absent and self._state.model is None:
            raise ModelUnknown
        residency.slots.check(residency.demand(call.owner, wanted, turn))
        return None if absent else self._install(session, call, wanted)

    def _recorded(self, session: Session, call: MappingCall) -> Mapping | None:
        """What another rank of the session was answered, while it is current."""
        mapping = session.mappings.get(call.mapping_id)
        if session.terms.ranks == 1 or mapping is None or mapping.refs != tuple(call.refs):
            return None
        if not self._state.layout.is_current(mapping.slots, mapping.generation):
            return None
        self.used(session, mapping)
        return mapping

    def _install(self, session: Session, call: MappingCall, wanted: Wanted) -> Mapping:
        residency, layout = self._state.residency, self._state.layout
        entries = residency.entries(wanted)
        self._withdraw(call.owner, unless=call.refs)
        if layout.generation <= session.last_generation:
            # A generation names one mapping of the session, so that a Forward that was sent for the mapping before
            # can never be taken for one of this.
            residency.advance()
        mapping = Mapping(call.mapping_id, entries, self._state.layout.epoch, self._state.layout.generation)
        session.mappings[call.mapping_id] = mapping
        session.last_generation = mapping.generation
        session.last_used[call.mapping_id] = self._state.now()
        residency.pin(call.owner, mapping.slots)
        if self._waiting or self._state.layout is not layout:
            self._state.publish()
        return mapping

    async def _load_and_set(self, call: MappingCall, turn: object) -> Mapping | None:
        """Verifies all that is missing before anything is evicted; None when the world changed meanwhile."""
        state, residency = self._state, self._state.residency
        wanted = residency.resolve(call.refs, call.session)
        absent = residency.absent(wanted)
        claim = Claim(call.session, slot=False, bytes=True)
        for ref in absent:
            residency.claim(_digest(ref), claim)
        try:
            weights = {_digest(ref): await self._loads.bytes_of(ref) for ref in absent}
            if turn not in self._calls or residency.resolve(call.refs, call.session) != wanted:
                return None
            return await self._fill_and_set(call, wanted, weights, turn)
        finally:
            for ref in absent:
                residency.unclaim(_digest(ref), claim)
            state.publish()

    async def _fill_and_set(
        self, call: MappingCall, wanted: Wanted, weights: dict[Digest, HostAdapter], turn: object
    ) -> Mapping | None:
        """From the check of the room to the begin of the fills nothing else runs."""
        state, residency = self._state, self._state.residency
        refs = {_digest(ref): ref for ref in wanted if ref is not None}
        missing = [ref for digest, ref in refs.items() if state.layout.find(digest) is None]
        if any(_digest(ref) not in weights for ref in missing):
            return None
        residency.slots.check(residency.demand(call.owner, wanted, turn))
        claim = Claim(call.session)
        for digest in refs:
            residency.claim(digest, claim)
        try:
            # The mapping of before keeps its pins on what is wanted again.
            slots = {residency.readable_slot(digest) for digest in refs}
            residency.pin(call.owner, residency.pins.by(call.owner) & slots)
            for ref in missing:
                self._loads.begin(weights[_digest(ref)], ref.name)
            for digest in refs:
                await self._loads.filled(digest)
            session = self._check(call)
            again = residency.resolve(call.refs, call.session)
            if turn not in self._calls or again != wanted or residency.absent(wanted):
                return None
            return self._install(session, call, wanted)
        finally:
            for digest in refs:
                residency.unclaim(digest, claim)
            state.publish()

    def release(self, session_id: SessionId, mapping_id: int) -> None:
        """Ends a mapping and its pins. Idempotent."""
        session = self._state.sessions.get(session_id)
        session.mappings.pop(mapping_id, None)
        session.last_used.pop(mapping_id, None)
        self._withdraw(MappingOwner(session_id, mapping_id))
        self._state.residency.release(MappingOwner(session_id, mapping_id))
        self._state.publish()

    # Idleness

    def used(self, session: Session, mapping: Mapping) -> None:
        """The mapping is used now; one that lost its pins takes them again, unless a call waits to replace it."""
        session.last_used[mapping.mapping_id] = self._state.now()
        self._renew(MappingOwner(session.session_id, mapping.mapping_id), mapping)

    def _renew(self, owner: MappingOwner, mapping: Mapping) -> None:
        pins = self._state.residency.pins
        if all(owner in pins.of(slot) for slot in mapping.slots):
            return
        if not any(place.owner == owner for place in self._waiting.values()):
            self._state.residency.renew(owner, mapping.entries)

    def expire(self) -> None:
        """Takes the pins of idle mappings, ends the holds whose time is over, and wakes those who waited too long."""
        state, residency, now = self._state, self._state.residency, self._state.now()
        for owner in {owner for owners in residency.pins.owners.values() for owner in owners}:
            if isinstance(owner, MappingOwner):
                last_used = state.sessions.get(owner.session).last_used.get(owner.mapping_id, now)
                if now - last_used >= state.limits.mapping_idle_seconds:
                    residency.release(owner)
                    reason = f"mapping {owner.mapping_id} was idle"
                    state.events.record(
                        EventKind.EXPIRED, state.layout.generation, session=owner.session, reason=reason
                    )
                    state.publish()
        for hold in residency.holds.expired(now):
            residency.release_hold(hold.owner, "its time is over")
            state.publish()
        for turn, place in self._waiting.items():
            if place.deadline <= now:
                self._wake(turn)

    # Holds

    async def hold(self, terms: HoldTerms, ref: AdapterRef) -> Hold:
        """Keeps the adapter's bytes, and its slot if it is asked for and reserved, from leaving.

        One step when all of it is there; else what is missing is loaded first.
        """
        state, residency, owner = self._state, self._state.residency, terms.owner
        state.check_hold(owner)
        wanted = residency.resolve([ref], owner.session)[0]
        assert wanted is not None
        needs_slot = terms.slot and residency.may_hold_slot(owner, _digest(wanted))
        if state.tiers.from_host(_digest(wanted)) and (not needs_slot or not residency.absent([wanted])):
            hold = residency.hold(terms, wanted, state.now())
            state.publish()
            return hold
        return await state.outliving(self._load_and_hold(terms, wanted))

    async def _load_and_hold(self, terms: HoldTerms, wanted: AdapterRef) -> Hold:
        state, residency, owner, digest = self._state, self._state.residency, terms.owner, _digest(wanted)
        claims = [Claim(owner.session, slot=False, bytes=True), Claim(owner.session)]
        residency.claim(digest, claims[0])
        try:
            weights = await self._loads.bytes_of(wanted)
            if terms.slot and residency.may_hold_slot(owner, digest):
                with contextlib.suppress(SlotsExhausted, ModelUnknown):  # then the bytes alone are held
                    await self._loads.make_resident(weights, wanted.name, claims[1])
            state.check_hold(owner)
            residency.resolve([wanted], owner.session)
            return residency.hold(terms, wanted, state.now())
        finally:
            for claim in claims:
                residency.unclaim(digest, claim)
            state.publish()

    def release_hold(self, session_id: SessionId, hold_id: int) -> None:
        """Ends a hold. Idempotent."""
        self._state.sessions.get(session_id)
        self._state.residency.release_hold(HoldOwner(session_id, hold_id), "released")
        self._state.publish()


def _digest(ref: AdapterRef) -> Digest:
    assert ref.digest is not None
    return ref.digest
