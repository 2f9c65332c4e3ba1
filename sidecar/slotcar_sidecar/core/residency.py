"""Names, adapters, keeps, the layout and its pins: which digest each name has and which slot each digest has.

Invariants: a keep's name is resident; a draining slot has a pin and no name; a claimed digest is never a victim.
Every method is one step: it changes everything that belongs together, or raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from slotcar_sidecar.core.adapter import Adapter
from slotcar_sidecar.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    AdapterNotResident,
    CapacityExceeded,
    SlotsExhausted,
)
from slotcar_sidecar.core.events import EventKind, EventLog
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest, SessionId, SlotId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.mapping import Entry
from slotcar_sidecar.core.pins import MappingOwner, Pins
from slotcar_sidecar.core.policy import least_recently_used

_RETRY_SECONDS = 1.0
_READABLE = (SlotState.OCCUPIED, SlotState.DRAINING)


class OnConflict(Enum):
    """What a load does when its name has other bytes."""

    FAIL = "fail"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Resident:
    """A name with what it resolves to; `slot` is None when the adapter is in no slot."""

    name: AdapterName
    adapter: Adapter
    source: str
    slot: SlotId | None
    keep: bool
    pins: int


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What an unload did; `slot_state` is None when the adapter was in no slot."""

    digest: Digest
    slot_state: SlotState | None
    pins_ended: int


class Residency:
    """The single table that loads, unloads and mappings change."""

    def __init__(self, layout: Layout, events: EventLog, on_forget: Callable[[Digest], None], max_names: int) -> None:
        self._layout = layout
        self._pins = Pins()
        self._names: dict[AdapterName, Digest] = {}
        self._named: dict[Digest, set[AdapterName]] = {}
        self._adapters: dict[Digest, Adapter] = {}
        self._sources: dict[AdapterName, str] = {}
        self._keeps: set[AdapterName] = set()
        self._claims: dict[Digest, set[object]] = {}
        self._last_used: dict[SlotId, int] = {}
        self._uses = 0
        self.events = events
        self._on_forget = on_forget
        self._max_names = max_names

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def pins(self) -> Pins:
        return self._pins

    @property
    def keeps(self) -> int:
        return len(self._keeps)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._names)

    # Look-ups

    def digest_of(self, ref: AdapterRef) -> Digest:
        """The digest that the name has now. Raises AdapterNotFound, also when `ref` says another digest."""
        digest = self._names.get(ref.name)
        if digest is None or ref.digest not in (None, digest):
            raise AdapterNotFound(ref)
        return digest

    def digest_named(self, name: AdapterName) -> Digest | None:
        """The digest that the name has now, None for an unknown name."""
        return self._names.get(name)

    def source_of(self, ref: AdapterRef) -> str:
        """Where the name was loaded from. Raises AdapterNotFound as `digest_of` does."""
        self.digest_of(ref)
        return self._sources[ref.name]

    def describe(self, ref: AdapterRef) -> Resident:
        """What the name has; with a digest, also one that is pinned, so that who pins it can look it up."""
        slot = self._layout.find(ref.digest) if ref.digest is not None else None
        if ref.digest is not None and slot is not None and self._pins.of(slot):
            return self._described(ref.name, ref.digest)
        return self._described(ref.name, self.digest_of(ref))

    def describe_all(self) -> tuple[Resident, ...]:
        """Every name, in order."""
        return tuple(self._described(name, digest) for name, digest in sorted(self._names.items()))

    def _described(self, name: AdapterName, digest: Digest) -> Resident:
        slot = self._layout.find(digest)
        if slot is not None and self._layout[slot].state is SlotState.FILLING:
            slot = None
        pins = len(self._pins.of(slot)) if slot is not None else 0
        keep = name in self._keeps and self._names[name] == digest
        adapter = self._adapters[digest]
        return Resident(name, adapter, self._sources.get(name, adapter.source), slot, keep, pins)

    def resolve(self, refs: Sequence[AdapterRef | None], session: SessionId) -> tuple[Entry | None, ...]:
        """Each ref's digest and slot, None for the base model, all or nothing.

        A bare name has the digest that it has now. `name@digest` is that digest while the name has it, and after that
        for as long as `session` pins it. Raises AdapterNotFound or AdapterNotResident with every ref at fault.
        """
        slots = {slot.digest: SlotId(index) for index, slot in enumerate(self._layout.slots) if slot.state in _READABLE}
        entries: list[Entry | None] = []
        resolved: dict[AdapterRef, Entry] = {}
        unknown: dict[AdapterRef, None] = {}
        absent: dict[AdapterRef, None] = {}
        for ref in refs:
            if ref is None:
                entries.append(None)
                continue
            if ref in resolved:
                entries.append(resolved[ref])
                continue
            digest = self._names.get(ref.name)
            if ref.digest is not None and ref.digest != digest:
                digest = ref.digest if self._is_pinned_by(session, slots.get(ref.digest)) else None
            slot = slots.get(digest) if digest is not None else None
            if digest is None:
                unknown[ref] = None
            elif slot is None:
                absent[ref] = None
            else:
                resolved[ref] = Entry(ref, digest, slot)
                entries.append(resolved[ref])
        if unknown:
            raise AdapterNotFound(*unknown)
        if absent:
            raise AdapterNotResident(*absent)
        return tuple(entries)

    def _is_pinned_by(self, session: SessionId, slot: SlotId | None) -> bool:
        return slot is not None and any(owner.session == session for owner in self._pins.of(slot))

    # Pins

    def pin(self, owner: MappingOwner, slots: Iterable[SlotId]) -> None:
        """`owner` pins exactly `slots`; what only it pinned before may drain away."""
        slots = tuple(slots)
        self.touch(slots)
        before = self._pins
        self._pins = before.replace(owner, slots)
        for slot in before.pinned() - self._pins.pinned():
            self._free_if_drained(slot)

    def release(self, owner: MappingOwner) -> None:
        """`owner` pins nothing any more. Idempotent."""
        self.pin(owner, ())

    def touch(self, slots: Iterable[SlotId]) -> None:
        """The slots are used now."""
        self._uses += 1
        for slot in slots:
            self._last_used[slot] = self._uses

    def advance(self) -> None:
        """Moves to the next generation though no slot changes, so that a mapping made now has one of its own."""
        self._layout = self._layout.advance()

    # Loads

    def claim(self, digest: Digest, owner: object) -> None:
        """A load needs the digest: it is neither evicted nor forgotten until `unclaim`."""
        self._claims.setdefault(digest, set()).add(owner)

    def unclaim(self, digest: Digest, owner: object) -> None:
        """Ends a claim; a digest that nothing refers to any more is freed."""
        owners = self._claims.get(digest, set())
        owners.discard(owner)
        if not owners:
            self._claims.pop(digest, None)
            self._retire(digest)

    def check_name(self, name: AdapterName, digest: Digest, on_conflict: OnConflict, *, keep: bool) -> None:
        """Raises AdapterConflict, SlotsExhausted or CapacityExceeded unless `bind` would succeed now."""
        found = self._names.get(name, digest)
        if found != digest and on_conflict is OnConflict.FAIL:
            raise AdapterConflict(name, found=found, wanted=digest)
        if name not in self._names and len(self._names) >= self._max_names:
            raise CapacityExceeded(
                f"the server has {self._max_names} adapters already: unload one",
                found=len(self),
                wanted=self._max_names,
            )
        if keep:
            self._check_keep(name)

    def begin_fill(self, digest: Digest, taker: AdapterName) -> SlotId:
        """Takes a slot for a digest that has none: a free one, or the policy's victim. Raises SlotsExhausted."""
        layout = self._layout
        free = layout.in_state(SlotState.FREE)
        slot = least_recently_used(free or self._victims(), self._last_used)
        if slot is None:
            count = len(layout.slots)
            raise SlotsExhausted(
                f"none of the {count} slots can take {taker}: each is pinned, kept or in a load",
                retry_after_seconds=_RETRY_SECONDS,
                slots=count,
                pinned=len(self._pins.pinned()),
                kept=len(self._kept_digests()),
                loading=sum(slot.digest in self._claims for slot in layout.slots),
            )
        victim = layout[slot].digest
        self._layout = layout.begin_fill(slot, digest)
        self.touch((slot,))
        if victim is not None:
            name = min(self._named.get(victim, ()), default=None)
            self._record(EventKind.EVICTED, name=name, digest=victim, slot=slot, reason=f"slot taken by {taker}")
        return slot

    def finish_fill(self, slot: SlotId) -> None:
        """The slot's bytes are written: it becomes visible."""
        self._layout = self._layout.occupy(slot)

    def abandon_fill(self, slot: SlotId) -> None:
        """The slot's bytes are not the digest's: it becomes free."""
        self._layout = self._layout.release(slot)

    def bind(
        self, name: AdapterName, adapter: Adapter, on_conflict: OnConflict, *, keep: bool, source: str | None = None
    ) -> None:
        """Gives a resident adapter the name, in one step with its keep; what the name had before may drain away.

        `source` is where the name is loaded from again; by default where it was, or where these bytes were read.
        """
        digest = adapter.digest
        self.check_name(name, digest, on_conflict, keep=keep)
        slot = self._layout.find(digest)
        assert slot is not None
        assert self._layout[slot].state in _READABLE
        before = self._names.get(name)
        self._names[name] = digest
        self._named.setdefault(digest, set()).add(name)
        self._adapters[digest] = adapter
        self._sources[name] = source or (self._sources.get(name) if before == digest else None) or adapter.source
        if keep:
            self._keeps.add(name)
        if self._layout[slot].state is SlotState.DRAINING:
            self._layout = self._layout.revive(slot)
        if before is not None and before != digest:
            self._record(EventKind.REPLACED, name=name, digest=digest, slot=slot, reason=f"was {before}")
            self._unname(before, name)
            self._retire(before)
        else:
            self._record(EventKind.LOADED, name=name, digest=digest, slot=slot)

    # Operators' verbs

    def unload(self, ref: AdapterRef, *, force: bool) -> Unloaded:
        """Takes the name and its keep away; the digest's slot is freed, drains, or stays for another name."""
        digest = self.digest_of(ref)
        del self._names[ref.name], self._sources[ref.name]
        self._keeps.discard(ref.name)
        self._unname(digest, ref.name)
        slot = self._layout.find(digest)
        if slot is not None and self._layout[slot].state is SlotState.FILLING:
            slot = None
        owners = frozenset(self._pins.of(slot)) if slot is not None else frozenset()
        ended = 0
        if force and slot is not None and digest not in self._named:
            self._layout = self._layout.invalidate(slot)
            self._pins = self._pins.end(slot)
            ended = len(owners)
        reason = f"forced; {ended} pins ended" if force else ""
        self._record(EventKind.UNLOADED, name=ref.name, digest=digest, slot=slot, reason=reason)
        self._retire(digest)
        return Unloaded(digest, self._layout[slot].state if slot is not None else None, ended)

    def keep(self, ref: AdapterRef) -> None:
        """Asks for a resident name to stay resident. Idempotent."""
        self.digest_of(ref)
        if self.describe(ref).slot is None:
            raise AdapterNotResident(ref)
        self._check_keep(ref.name)
        if ref.name not in self._keeps:
            self._keeps.add(ref.name)
            self._record(EventKind.KEPT, name=ref.name, digest=self._names[ref.name])

    def release_keep(self, ref: AdapterRef) -> None:
        """Ends a keep. Idempotent."""
        digest = self.digest_of(ref)
        if ref.name in self._keeps:
            self._keeps.discard(ref.name)
            self._record(EventKind.KEEP_RELEASED, name=ref.name, digest=digest)

    # Steps that the methods above share

    def _check_keep(self, name: AdapterName) -> None:
        limit = len(self._layout.slots) - 1
        if len(self._keeps - {name}) >= limit:
            raise SlotsExhausted(
                f"{limit} of {limit + 1} slots are kept already: release a keep first", slots=limit + 1, kept=limit
            )

    def _kept_digests(self) -> set[Digest]:
        return {self._names[name] for name in self._keeps}

    def _victims(self) -> list[SlotId]:
        kept = self._kept_digests()
        return [
            slot
            for slot in self._layout.in_state(SlotState.OCCUPIED)
            if not self._pins.of(slot)
            and self._layout[slot].digest not in kept
            and self._layout[slot].digest not in self._claims
        ]

    def _unname(self, digest: Digest, name: AdapterName) -> None:
        names = self._named[digest]
        names.discard(name)
        if not names:
            del self._named[digest]

    def _retire(self, digest: Digest) -> None:
        """Frees a digest that has no name and no claim, or lets its slot drain while it is pinned."""
        if digest in self._named or digest in self._claims:
            return
        slot = self._layout.find(digest)
        if slot is not None and self._pins.of(slot):
            if self._layout[slot].state is SlotState.OCCUPIED:
                self._layout = self._layout.drain(slot)
                pins = len(self._pins.of(slot))
                self._record(EventKind.DRAINING, digest=digest, slot=slot, reason=f"{pins} pins left")
            return
        if slot is not None:
            self._layout = self._layout.release(slot)
            self._record(EventKind.FREED, digest=digest, slot=slot, reason="no name has it")
        if self._adapters.pop(digest, None) is not None:
            self._on_forget(digest)

    def _free_if_drained(self, slot: SlotId) -> None:
        digest = self._layout[slot].digest
        if self._layout[slot].state is SlotState.DRAINING and digest is not None:
            self._retire(digest)

    def _record(
        self,
        kind: EventKind,
        *,
        digest: Digest,
        name: AdapterName | None = None,
        slot: SlotId | None = None,
        reason: str = "",
    ) -> None:
        self.events.record(kind, self._layout.generation, name=name, digest=digest, slot=slot, reason=reason)

    def check_integrity(self) -> None:
        """Asserts the invariants of this table, and the layout's."""
        self._layout.check_integrity()
        assert len(self._keeps) < len(self._layout.slots)
        assert self._sources.keys() == self._names.keys()
        for name, digest in self._names.items():
            assert digest in self._adapters, name
            assert name in self._named[digest], name
        assert {name for names in self._named.values() for name in names} == self._names.keys()
        for name in self._keeps:
            slot = self._layout.find(self._names[name])
            assert slot is not None, f"kept {name} is in no slot"
            assert self._layout[slot].state is SlotState.OCCUPIED, f"kept {name} is {self._layout[slot].state}"
        for slot in self._pins.pinned():
            assert self._layout[slot].state in _READABLE, f"slot {slot} is pinned and {self._layout[slot].state}"
        for slot in self._layout.in_state(SlotState.DRAINING):
            assert self._pins.of(slot) or self._layout[slot].digest in self._claims
            assert self._layout[slot].digest not in self._named
