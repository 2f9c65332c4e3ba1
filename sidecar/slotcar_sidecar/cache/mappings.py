"""Mappings: what sessions pin, at once or in their turn, and for how long.

A call that waits for slots holds nothing meanwhile, also not the pins of the mapping that it replaces, so that no two
of them can wait for each other; who waits first is served first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest, SessionId
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.pins import MappingOwner
from slotcar_sidecar.core.ports import HostAdapter
from slotcar_sidecar.core.session import Session
from slotcar_sidecar.core.slots import Claim

Wanted = Folded[AdapterRef | None]


@dataclass(slots=True, eq=False)
class _Asked:
    """A SetMapping under way: its turn, if it waits, and what keeps what it wants known meanwhile.

    `withdrawn`: it is to have no effect any more. `woken`: it is to look again. `queued_at`: when it began to wait.
    """

    call: MappingCall
    deadline: float
    withdrawn: bool = False
    has_looked: bool = False
    queued_at: float = 0.0
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    kept: tuple[tuple[Digest, Claim], ...] = ()


class Mappings:
    """Sets, renews and ends what the mappings of sessions pin."""

    def __init__(self, state: State, loads: Loads) -> None:
        self._state = state
        self._loads = loads
        self._asked: dict[_Asked, None] = {}
        state.listeners.append(self._wake)

    @property
    def waiting(self) -> int:
        return len(self._state.residency.slots.queue)

    def missing(self) -> frozenset[AdapterName]:
        """The names that calls in the queue want and that are in no slot."""
        residency = self._state.residency
        refs = {ref for asked in self._queue for ref in asked.call.refs.table if ref is not None}
        digests = {ref: ref.digest or residency.names.get(ref.name) for ref in refs}
        return frozenset(
            ref.name for ref, digest in digests.items() if digest is None or residency.readable_slot(digest) is None
        )

    async def set(self, call: MappingCall) -> Mapping:
        """Resolves and pins in one step, all or nothing; with `load`, what is in no slot is made resident first."""
        state = self._state
        self._check(call)
        asked = _Asked(call, state.now() + call.wait_seconds)
        self._asked[asked] = None
        try:
            while not asked.withdrawn:
                try:
                    mapping = self._set_now(asked)
                    if mapping is None:
                        mapping = await state.outliving(self._load_and_set(asked))
                    if mapping is not None:
                        return mapping
                except SlotsExhausted as error:
                    if error.retry_after_seconds is None or state.now() >= asked.deadline:
                        self._record(EventKind.REFUSED, call.session, f"{error.reason}: {error.message}")
                        raise
                    await self._wait(asked)
            raise MappingNotFound(call.mapping_id)
        finally:
            asked.withdrawn = True
            del self._asked[asked]
            self._leave_queue(asked)
            self._pin_again(call.owner)

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

    def _record(self, kind: EventKind, session: SessionId, reason: str) -> None:
        self._state.events.record(kind, self._state.layout.generation, session=session, reason=reason)

    # The queue

    async def _wait(self, asked: _Asked) -> None:
        """Takes a place in the queue, if it has none, and waits until it is to look again.

        What the mapping of before pinned is free meanwhile; what of it has no name stays known to the session.
        """
        state, residency, call = self._state, self._state.residency, asked.call
        if asked not in residency.slots.queue:
            self._check_queue(call)
            wanted = residency.resolve(call.refs, call.session)
            claim = Claim(call.session, slot=False, bytes=True, resolves=True)
            nameless = {
                ref.digest for ref in wanted.table if ref and ref.digest and not residency.names.is_named(ref.digest)
            }
            asked.kept = tuple((digest, claim) for digest in nameless)
            for digest, claim in asked.kept:
                residency.claim(digest, claim)
            residency.slots.queue.append(asked)
            asked.queued_at = state.now()
            if residency.pins.by(call.owner):
                residency.release(call.owner)
                state.publish()
        if not state.closing.is_set():
            await asked.woken.wait()
            asked.woken.clear()
        if state.closing.is_set():
            raise ShuttingDown

    def _check_queue(self, call: MappingCall) -> None:
        """Raises CapacityExceeded when the session has a call in the queue for each mapping that its ranks may have."""
        session = self._state.sessions.get(call.session)
        most = self._state.sessions.max_mappings * session.terms.ranks
        found = sum(asked.call.session == call.session for asked in self._queue)
        if found >= most:
            raise CapacityExceeded(f"{found} calls of the session wait already", found=found, wanted=most)

    @property
    def _queue(self) -> Iterator[_Asked]:
        return (asked for asked in self._state.residency.slots.queue if isinstance(asked, _Asked))

    def _leave_queue(self, asked: _Asked) -> None:
        queue = self._state.residency.slots.queue
        if asked in queue:
            queue.remove(asked)
            self._state.environment.observer.mapping_waited(self._state.now() - asked.queued_at)
            for digest, claim in asked.kept:
                self._state.residency.unclaim(digest, claim)
            self._state.publish()

    def _wake(self) -> None:
        """Something changed: who is first looks again, and who has a reservation; all do when the server closes."""
        reserved = self._state.residency.slots.reserved
        for index, asked in enumerate(self._queue):
            if index == 0 or asked.call.session in reserved or self._state.closing.is_set():
                asked.woken.set()
            elif not reserved:
                break

    def wake_session(self, session_id: SessionId) -> None:
        """The session is gone: its calls that wait find that out."""
        for asked in self._queue:
            if asked.call.session == session_id:
                asked.woken.set()

    def _withdraw(self, owner: MappingOwner, unless: _Asked | None = None) -> None:
        """The owner's mapping is released, or set by `unless`: what was asked for it before has no effect any more."""
        for asked in self._asked:
            if asked is unless:
                break
            if asked.call.owner == owner and (unless is None or asked.call.refs != unless.call.refs):
                asked.withdrawn = True
                asked.woken.set()

    # Steps

    def _set_now(self, asked: _Asked) -> Mapping | None:
        """The mapping, if its adapters are in slots; None when they must be loaded first."""
        call, residency = asked.call, self._state.residency
        session = self._check(call)
        recorded = self._recorded(session, call)
        if recorded is not None:
            return recorded
        wanted = residency.resolve(call.refs, call.session)
        absent = residency.absent(wanted)
        self._count_lookups(asked, wanted, len(absent))
        if absent and not call.load:
            digests = {ref.digest for ref in absent}
            pairs = zip(call.refs.table, wanted.table, strict=True)
            raise AdapterNotResident(*dict.fromkeys(ref for ref, found in pairs if found and found.digest in digests))
        if absent and self._state.model is None:
            raise ModelUnknown
        residency.slots.check(residency.demand(call.owner, wanted, asked))
        return None if absent else self._install(session, asked, wanted)

    def _count_lookups(self, asked: _Asked, wanted: Wanted, misses: int) -> None:
        """Each adapter of a call once, however often the call looks."""
        if not asked.has_looked:
            asked.has_looked = True
            adapters = len({ref.digest for ref in wanted.table if ref is not None})
            self._state.environment.observer.looked_up("device", adapters - misses, misses)

    def _recorded(self, session: Session, call: MappingCall) -> Mapping | None:
        """What another rank of the session was answered, while it is current."""
        mapping = session.mappings.get(call.mapping_id)
        if session.terms.ranks == 1 or mapping is None or mapping.refs != call.refs:
            return None
        if not self._state.layout.is_current(mapping.slots, mapping.generation):
            return None
        self.used(session, mapping)
        return mapping

    def _install(self, session: Session, asked: _Asked, wanted: Wanted) -> Mapping:
        call, residency, layout = asked.call, self._state.residency, self._state.layout
        entries = residency.entries(wanted)
        before = session.mappings.get(call.mapping_id)
        if before is not None and not layout.is_current(before.slots, before.generation) and before.refs == call.refs:
            self._state.environment.observer.recovered()
        self._withdraw(call.owner, unless=asked)
        if layout.generation <= session.last_generation:
            # A generation names one mapping of the session, so that a Forward that was sent for the mapping before
            # can never be taken for one of this.
            residency.slots.advance()
        mapping = Mapping(call.mapping_id, entries, self._state.layout.epoch, self._state.layout.generation)
        session.mappings[call.mapping_id] = mapping
        session.last_generation = mapping.generation
        session.last_used[call.mapping_id] = self._state.now()
        residency.pin(call.owner, mapping.slots)
        if self.waiting or self._state.layout.slots is not layout.slots:
            self._state.publish()  # a generation alone is nothing that anybody waits for
        return mapping

    async def _load_and_set(self, asked: _Asked) -> Mapping | None:
        """Verifies all that is missing before anything is evicted; None when the world changed meanwhile."""
        call, state, residency = asked.call, self._state, self._state.residency
        wanted = residency.resolve(call.refs, call.session)
        absent = residency.absent(wanted)
        claim = Claim(call.session, slot=False, bytes=True)
        for ref in absent:
            residency.claim(_digest(ref), claim)
        try:
            weights = {_digest(ref): await self._loads.bytes_of(ref) for ref in absent}
            self._check(call)
            if asked.withdrawn or residency.resolve(call.refs, call.session) != wanted:
                return None
            return await self._fill_and_set(asked, wanted, weights)
        finally:
            for ref in absent:
                residency.unclaim(_digest(ref), claim)
            state.publish()

    async def _fill_and_set(self, asked: _Asked, wanted: Wanted, weights: dict[Digest, HostAdapter]) -> Mapping | None:
        """From the check of the room to the begin of the fills nothing else runs."""
        call, state, residency = asked.call, self._state, self._state.residency
        refs = {_digest(ref): ref for ref in wanted.table if ref is not None}
        missing = [ref for digest, ref in refs.items() if state.layout.find(digest) is None]
        if any(_digest(ref) not in weights for ref in missing):
            return None
        demand = residency.demand(call.owner, wanted, asked)
        residency.slots.check(demand)
        claim = Claim(call.session)
        for digest in refs:
            residency.claim(digest, claim)
        try:
            if not residency.slots.has_room(replace(demand, pins=residency.pins)):
                # The mapping of before lets go of what is not wanted again, but only if it must.
                slots = {residency.readable_slot(digest) for digest in refs}
                residency.pin(call.owner, residency.pins.by(call.owner) & slots)
            for ref in missing:
                self._loads.begin(weights[_digest(ref)], ref.name, "mapping")
            ends = await asyncio.gather(*map(self._loads.filled, refs), return_exceptions=True)
            for failure in filter(None, ends):
                raise failure
            session = self._check(call)
            again = residency.resolve(call.refs, call.session)
            if asked.withdrawn or again != wanted or residency.absent(wanted):
                return None
            if not residency.slots.has_room(residency.demand(call.owner, wanted, asked)):
                return None  # one was unloaded by force, and has come back in somebody else's room
            return self._install(session, asked, wanted)
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
        if not any(asked.call.owner == owner for asked in self._queue):
            self._state.residency.renew(owner, mapping.entries)

    def _pin_again(self, owner: MappingOwner) -> None:
        """The mapping that was not replaced after all takes its pins again, if it is current and may."""
        session = self._state.sessions.peek(owner.session)
        mapping = session.mappings.get(owner.mapping_id) if session else None
        if mapping is not None and self._state.layout.is_current(mapping.slots, mapping.generation):
            self._renew(owner, mapping)

    def expire(self) -> None:
        """Takes the pins of idle mappings, and wakes the calls that waited for as long as they said."""
        now, residency = self._state.now(), self._state.residency
        idle = [owner for owner in self._pinning() if now - self._last_used(owner) >= self._idle_seconds]
        residency.release(*idle)
        for owner in idle:
            self._record(EventKind.EXPIRED, owner.session, f"mapping {owner.mapping_id} was idle")
        if idle:
            self._state.publish()
        for asked in self._queue:
            if asked.deadline <= now:
                asked.woken.set()

    def _pinning(self) -> frozenset[MappingOwner]:
        owners = self._state.residency.pins.owners.values()
        return frozenset(owner for each in owners for owner in each if isinstance(owner, MappingOwner))

    def _last_used(self, owner: MappingOwner) -> float:
        return self._state.sessions.get(owner.session).last_used.get(owner.mapping_id, self._state.now())

    @property
    def _idle_seconds(self) -> float:
        return self._state.limits.mapping_idle_seconds


def _digest(ref: AdapterRef) -> Digest:
    assert ref.digest is not None
    return ref.digest
