"""Which digest each name has, which slot each digest has, and who keeps them there.

Invariants: a keep's name is resident; a draining slot has a pin and no name; a digest is forgotten, with its bytes,
when no name, pin, hold or load refers to it. Every method is one step: it changes everything that belongs together,
or raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Unpack

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.bindings import Binding, OnConflict, Resident, Unloaded
from slotcar_sidecar.core.errors import AdapterNotFound, AdapterNotResident, RequestInvalid
from slotcar_sidecar.core.events import EventKind, EventLog, Subject
from slotcar_sidecar.core.folded import Folded
from slotcar_sidecar.core.holds import Hold, Holds, HoldTerms
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest, SessionId, SlotId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.mapping import Entry
from slotcar_sidecar.core.names import Names
from slotcar_sidecar.core.pins import HoldOwner, MappingOwner, PinOwner, Pins
from slotcar_sidecar.core.policy import Eviction
from slotcar_sidecar.core.slots import READABLE, Claim, Demand, Slots

__all__ = ["Residency"]


class Residency:
    """The single table that loads, unloads, holds and mappings change."""

    def __init__(
        self,
        layout: Layout,
        events: EventLog,
        on_forget: Callable[[Digest], None],
        max_names: int,
        eviction: Eviction = Eviction.LRU,
    ) -> None:
        self.names = Names(max_names)
        self.holds = Holds()
        self.slots = Slots(layout, lambda: self.names.kept_digests, eviction)
        self.events = events
        self._on_forget = on_forget

    @property
    def layout(self) -> Layout:
        return self.slots.layout

    @property
    def pins(self) -> Pins:
        return self.slots.pins

    def held_digests(self, is_retained: Callable[[Digest], bool]) -> frozenset[Digest]:
        """The digests whose bytes memory may not drop: held, without a source, or on their way to one of the two.

        `is_retained`: another tier has them for good.
        """
        alone = frozenset(digest for digest in self.names.without_source() if not is_retained(digest))
        return self.holds.digests() | alone | self.slots.claimed_bytes()

    # Look-ups

    def describe(self, ref: AdapterRef) -> Resident:
        """What the name has; with a digest, also what the name had while that is pinned or held."""
        if ref.digest is not None and self.names.was_known_as(ref):
            return self._described(ref.name, ref.digest)
        return self._described(ref.name, self.names.digest_of(ref))

    def describe_all(self) -> tuple[Resident, ...]:
        """Every name, in order."""
        return tuple(self._described(name, self.names.digest_of(AdapterRef(name))) for name in self.names)

    def _described(self, name: AdapterName, digest: Digest) -> Resident:
        slot, owners = self.readable_slot(digest), self._owners(digest)
        is_now = self.names.get(name) == digest
        adapter = self.names.adapter(digest)
        source = self.names.source_of(AdapterRef(name)) if is_now else adapter.source
        history = self.names.history(name) if is_now else ()
        return Resident(name, adapter, source, slot, is_now and self.names.is_kept(name), len(owners), history)

    def residents(self) -> tuple[Digest, ...]:
        """The digests that are in slots and have a name, the latest used first."""
        slots = self.slots.uses.latest_first(self.layout.in_state(SlotState.OCCUPIED))
        return tuple(digest for slot in slots if (digest := self.layout[slot].digest) is not None)

    def readable_slot(self, digest: Digest) -> SlotId | None:
        """The slot that has the digest's bytes; None also while they are being written."""
        slot = self.layout.find(digest)
        return slot if slot is not None and self.layout[slot].state in READABLE else None

    def resolve(self, refs: Folded[AdapterRef | None], session: SessionId) -> Folded[AdapterRef | None]:
        """Each ref with its digest, None for the base model, all or nothing.

        A bare name has the digest that it has now. `name@digest` is that digest while the name has it, and after that
        for as long as `session` pins or holds it. Raises AdapterNotFound with every ref at fault.
        """
        resolved: list[AdapterRef | None] = []
        unknown: dict[AdapterRef, None] = {}
        for ref in refs.table:
            if ref is None:
                resolved.append(None)
                continue
            digest = self.names.get(ref.name)
            if ref.digest is not None and ref.digest != digest:
                digest = ref.digest if self.names.was_known_as(ref) and self._has(session, ref.digest) else None
            if digest is None:
                unknown[ref] = None
            else:
                resolved.append(ref if ref.digest is not None else AdapterRef(ref.name, digest))
        if unknown:
            raise AdapterNotFound(*unknown)
        return Folded(resolved, refs.indices)

    def _has(self, session: SessionId, digest: Digest) -> bool:
        mine = any(owner.session == session for owner in self._owners(digest))
        return mine or self.slots.resolves(digest, session)

    def _owners(self, digest: Digest) -> frozenset[PinOwner]:
        """Who pins or holds the digest."""
        slot = self.layout.find(digest)
        return self.holds.of(digest) | (self.pins.of(slot) if slot is not None else frozenset())

    def entries(self, wanted: Folded[AdapterRef | None]) -> Folded[Entry | None]:
        """Resolved refs with their slots. Raises AdapterNotResident with every ref that is in none."""
        entries: list[Entry | None] = []
        absent: dict[AdapterRef, None] = {}
        for ref in wanted.table:
            slot = self.readable_slot(ref.digest) if ref is not None and ref.digest is not None else None
            if ref is None:
                entries.append(None)
            elif slot is None or ref.digest is None:
                absent[ref] = None
            else:
                entries.append(Entry(ref, ref.digest, slot, self.names.adapter(ref.digest).needs_base))
        if absent:
            raise AdapterNotResident(*absent)
        return Folded(entries, wanted.indices)

    def absent(self, wanted: Folded[AdapterRef | None]) -> tuple[AdapterRef, ...]:
        """The first ref of each digest that is in no slot, or in one that is still written."""
        first = {ref.digest: ref for ref in reversed(wanted.table) if ref is not None}
        return tuple(ref for digest, ref in first.items() if digest and self.readable_slot(digest) is None)

    # Pins of mappings

    def demand(self, owner: MappingOwner, wanted: Folded[AdapterRef | None], turn: object | None) -> Demand:
        """What a mapping of resolved refs takes, where what only the mapping that it replaces pins counts as free."""
        digests = {ref.digest for ref in wanted.table if ref is not None and ref.digest}
        found = {digest: self.layout.find(digest) for digest in digests}
        readable = [slot for digest in digests if (slot := self.readable_slot(digest)) is not None]
        fills = sum(slot is None for slot in found.values())
        what = "the mapping" if len(digests) != 1 else next(str(ref.name) for ref in wanted.table if ref is not None)
        joins = frozenset(slot for slot in found.values() if slot is not None and slot not in readable)
        return Demand(what, owner.session, self.pins.replace(owner, readable), fills, turn, joins)

    def pin(self, owner: MappingOwner, slots: Iterable[SlotId]) -> None:
        """`owner` pins exactly `slots`; what only it pinned before may drain away."""
        slots = tuple(slots)
        self.slots.uses.ask(slots)
        self._drained(self.slots.pin(owner, slots))

    def release(self, *owners: MappingOwner) -> None:
        """The owners pin nothing any more. Idempotent."""
        self._drained(self.slots.unpin(owners))

    def renew(self, owner: MappingOwner, entries: Folded[Entry | None]) -> None:
        """Pins again what an idle mapping uses, if all of it is there and there is room for that."""
        mine = [entry for entry in entries.table if entry is not None]
        slots = {entry.slot for entry in mine}
        if all(self.readable_slot(entry.digest) == entry.slot for entry in mine) and self._may_pin(owner, slots):
            self.pin(owner, slots)

    def _may_pin(self, owner: PinOwner, slots: Iterable[SlotId]) -> bool:
        return self.slots.has_room(Demand("", owner.session, self.pins.replace(owner, slots), 0))

    # Holds

    def hold(self, terms: HoldTerms, ref: AdapterRef, now: float) -> Hold:
        """Holds a digest whose bytes are there, from `now` on; the slot too, if the reservation has room for it."""
        assert ref.digest is not None
        owner, before = terms.owner, self.holds.get(terms.owner)
        slot = self.readable_slot(ref.digest) if terms.slot and self.may_hold_slot(owner, ref.digest) else None
        if slot is not None and not self._may_pin(owner, (slot,)):
            slot = None
        expires_at = now + terms.seconds if terms.seconds is not None else None
        hold = Hold(owner, ref, ref.digest, slot is not None, expires_at)
        self.holds.put(hold)
        self._drained(self.slots.pin(owner, () if slot is None else (slot,)))
        self._record(EventKind.HELD, name=ref.name, digest=ref.digest, slot=slot, session=owner.session)
        if before is not None and before.digest != ref.digest:
            self._retire(before.digest)
        return hold

    def may_hold_slot(self, owner: HoldOwner, digest: Digest) -> bool:
        """Whether the session's reservation has room for the slots of its holds and this one."""
        others = {hold.digest for hold in self.holds.of_session(owner.session) if hold.slot and hold.owner != owner}
        return len(others | {digest}) <= self.slots.reserved.get(owner.session, 0)

    def release_hold(self, owner: HoldOwner, reason: str) -> None:
        """Ends a hold; what only it kept goes. Idempotent."""
        hold = self.holds.remove(owner)
        if hold is not None:
            self._end_hold(hold, reason)

    def _end_hold(self, hold: Hold, reason: str) -> None:
        subject = Subject(name=hold.ref.name, digest=hold.digest, session=hold.owner.session, reason=reason)
        self._record(EventKind.HOLD_RELEASED, **subject)
        self.slots.pin(hold.owner, ())
        self._retire(hold.digest)

    # Loads

    def claim(self, digest: Digest, claim: Claim) -> None:
        """Keeps the digest from being forgotten while a load works on it."""
        self.slots.claim(digest, claim)

    def unclaim(self, digest: Digest, claim: Claim) -> None:
        """Ends a claim; a digest that nobody named meanwhile goes, or drains while it is pinned. Idempotent."""
        self.slots.unclaim(digest, claim)
        self._retire(digest)

    def check_binding(self, adapter: Adapter, binding: Binding) -> None:
        """Raises AdapterConflict, SlotsExhausted, CapacityExceeded or RequestInvalid unless `bind` would succeed."""
        name = binding.name
        if binding.on_conflict is OnConflict.FAIL:
            self.names.check_conflict(name, adapter.digest)
        self.names.check_room(name)
        kept = binding.keep or self.names.is_kept(name)
        if kept and not binding.in_slot and self.readable_slot(adapter.digest) is None:
            raise RequestInvalid("target_tier", found="TIER_HOST", wanted="TIER_DEVICE for a name that is kept")
        if kept:
            self.slots.check_keep(self.readable_slot(adapter.digest), len(self.names.kept | {name}))

    def begin_fill(
        self, digest: Digest, taker: AdapterName, idle_since: int | None = None
    ) -> tuple[SlotId, Digest | None]:
        """Takes a slot for a digest that has none: a free one, or that of the policy's victim; see Slots.take."""
        slot, victim = self.slots.take(digest, idle_since)
        if victim is not None:
            name = min(self.names.named(victim), default=None)
            self._record(EventKind.EVICTED, name=name, digest=victim, slot=slot, reason=f"slot taken by {taker}")
        return slot, victim

    def finish_fill(self, slot: SlotId) -> None:
        """The slot's bytes are written: it becomes visible, or goes if nobody wants it any more."""
        self.slots.occupy(slot)
        self._retire_slot(slot)

    def abandon_fill(self, slot: SlotId) -> None:
        """The slot's bytes are not the digest's: it becomes free."""
        digest = self.layout[slot].digest
        self.slots.release(slot)
        if digest is not None:
            self._retire(digest)

    def bind(self, adapter: Adapter, binding: Binding) -> None:
        """Gives an adapter the name, in one step with its keep; what the name had before may drain away."""
        self.check_binding(adapter, binding)
        name, digest = binding.name, adapter.digest
        slot = self.readable_slot(digest)
        assert slot is not None or not binding.in_slot
        before = self.names.bind(name, adapter, binding.source)
        subject = Subject(name=name, digest=digest, slot=slot, source=binding.source or adapter.source)
        if binding.keep:
            self.names.keep(name)
        if slot is not None and self.layout[slot].state is SlotState.DRAINING:
            self.slots.revive(slot)
        if before is not None:
            subject["reason"] = f"was {before}"
            self._record(EventKind.REPLACED, **subject)
            self._leave_alias(name, before)
            self._retire(before)
        else:
            self._record(EventKind.LOADED, **subject)

    # Operators' verbs

    def unload(self, ref: AdapterRef, *, force: bool) -> Unloaded:
        """Takes the name and its keep away; the digest's slot is freed, drains, or stays for another name."""
        digest = self.names.digest_of(ref)
        self.names.unbind(ref.name)
        slot = self.readable_slot(digest)
        ended: frozenset[PinOwner] = frozenset()
        ended_holds: list[Hold] = []
        if force and not self.names.is_named(digest):
            ended = self._owners(digest)
            ended_holds = [hold for owner in self.holds.of(digest) if (hold := self.holds.remove(owner)) is not None]
            if slot is not None:
                self.slots.invalidate(slot)
            self.slots.end_resolving(digest)
        reason = f"forced; {len(ended)} pins ended" if force else ""
        self._record(EventKind.UNLOADED, name=ref.name, digest=digest, slot=slot, reason=reason)
        for hold in ended_holds:
            self._end_hold(hold, f"{ref.name} was unloaded by force")
        self._leave_alias(ref.name, digest)
        self._retire(digest)
        return Unloaded(digest, self.layout[slot].state if slot is not None else None, len(ended))

    def keep(self, ref: AdapterRef) -> None:
        """Asks for a resident name to stay resident. Idempotent."""
        digest = self.names.digest_of(ref)
        slot = self.readable_slot(digest)
        if slot is None:
            raise AdapterNotResident(ref)
        self.slots.check_keep(slot, len(self.names.kept | {ref.name}))
        if self.names.keep(ref.name):
            self._record(EventKind.KEPT, name=ref.name, digest=digest)

    def release_keep(self, ref: AdapterRef) -> None:
        """Ends a keep. Idempotent."""
        digest = self.names.digest_of(ref)
        if self.names.release_keep(ref.name):
            self._record(EventKind.KEEP_RELEASED, name=ref.name, digest=digest)

    # Steps that the methods above share

    def _leave_alias(self, name: AdapterName, digest: Digest) -> None:
        """A digest that nobody pins or holds need not be known by the name that left it."""
        if not self._owners(digest):
            self.names.forget_alias(name, digest)

    def _retire(self, digest: Digest) -> None:
        """Frees a digest that has no name and no claim, or lets its slot drain while it is pinned.

        A slot that is being written is left alone: its end looks again.
        """
        slot = self.layout.find(digest)
        if self.names.is_named(digest) or self.slots.is_claimed(digest):
            return
        if slot is not None and self.layout[slot].state is SlotState.FILLING:
            return
        if slot is not None and self.pins.of(slot):
            if self.layout[slot].state is SlotState.OCCUPIED:
                self.slots.drain(slot)
                pins = len(self.pins.of(slot))
                self._record(EventKind.DRAINING, digest=digest, slot=slot, reason=f"{pins} pins left")
            return
        if slot is not None:
            self.slots.release(slot)
            self._record(EventKind.FREED, digest=digest, slot=slot, reason="no name has it")
        if not self.holds.is_held(digest) and self.names.forget(digest):
            self._on_forget(digest)

    def _drained(self, unpinned: Iterable[SlotId]) -> None:
        for slot in unpinned:
            if self.layout[slot].state is SlotState.DRAINING:
                self._retire_slot(slot)

    def _retire_slot(self, slot: SlotId) -> None:
        digest = self.layout[slot].digest
        if digest is not None:
            self._retire(digest)

    def _record(self, kind: EventKind, **subject: Unpack[Subject]) -> None:
        self.events.record(kind, self.layout.generation, **subject)

    def check_integrity(self) -> None:
        """Asserts the invariants of this table and of its parts."""
        self.names.check_integrity()
        self.slots.check_integrity()
        assert not self.names.kept or len(self.names.kept) < len(self.layout.slots)
        for name in self.names.kept:
            digest = self.names.digest_of(AdapterRef(name))
            slot = self.readable_slot(digest)
            assert slot is not None, f"kept {name} is in no slot"
            assert self.layout[slot].state is SlotState.OCCUPIED, f"kept {name} is {self.layout[slot].state}"
        for slot in self.layout.in_state(SlotState.DRAINING):
            digest_there = self.layout[slot].digest
            assert digest_there is not None
            assert not self.names.is_named(digest_there), f"slot {slot} drains and has a name"
        for hold in self.holds:
            self.names.adapter(hold.digest)
            pinned = self.pins.by(hold.owner)
            assert pinned == ({self.layout.find(hold.digest)} if hold.slot else frozenset()), hold
        for owners in self.pins.owners.values():
            assert all(self.holds.get(owner) is not None for owner in owners if isinstance(owner, HoldOwner)), "I6"
