"""Takes the state that the status page shows, in one step on the owner's thread, however many adapters there are.

Its cost is that of what is shown, and of one look at each name in the tables of the core.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as ReadOnly
from dataclasses import dataclass, field
from itertools import islice

from slotcar_sidecar.cache import AdapterCache
from slotcar_sidecar.core.calls import Capacity
from slotcar_sidecar.core.holds import Hold
from slotcar_sidecar.core.ids import AdapterName, AdapterRef, Digest, SlotId
from slotcar_sidecar.core.layout import SlotState
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.pins import MappingOwner, PinOwner
from slotcar_sidecar.core.reconcile import DesiredStatus, EntryStatus
from slotcar_sidecar.core.session import Session
from slotcar_sidecar.ops import state as shown
from slotcar_sidecar.ops.recent import LoadLog, NameLog, Timed, UseTimes
from slotcar_sidecar.ops.state import Most, State
from slotcar_sidecar.rpc.health import Phase

__all__ = ["Facts", "FollowedFiles", "StateTaker"]

_MOST_CHARACTERS = 500
_MOST_ORDERED = 64
"""Owners of a slot that are put in order; of more, any."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change in the life of the server."""

    host: str
    version: str
    device: str
    kernel: str
    eviction: str
    planes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FollowedFiles:
    """What State says of files that are followed: `certificates`, and what of them is `not_in_force`."""

    certificates: Callable[[], ReadOnly[str, float]] = dict
    not_in_force: Callable[[], ReadOnly[str, str]] = dict


@dataclass(frozen=True, slots=True)
class StateTaker:
    """`desired` has so many entries of the declared set, `wall_clock` is in Unix seconds, `started` in the cache's."""

    cache: AdapterCache
    facts: Facts
    phase: Callable[[], Phase]
    desired: Callable[[int], DesiredStatus]
    wall_clock: Callable[[], float]
    started: float
    loads: LoadLog
    names: NameLog = field(default_factory=NameLog)
    uses: UseTimes = field(default_factory=UseTimes)
    files: FollowedFiles = field(default_factory=FollowedFiles)

    def note_uses(self) -> None:
        """Which moment it is; the oftener it is called, the better is known when a slot was used."""
        self.uses.note(self.cache.residency.slots.uses.now, self._now)

    @property
    def _now(self) -> float:
        return self.cache.environment.clock()

    def take(self) -> State:
        """The server at this moment; call it on the owner's thread."""
        self.note_uses()
        cache, capacity, desired = self.cache, self.cache.capacity(), self.desired(Most.DECLARED)
        slots, adapters, sessions = tuple(self._slots()), tuple(self._adapters()), tuple(self._sessions())
        known = sum(bool(adapter.digest) for adapter in adapters)
        return State(
            time=self.wall_clock(),
            server=self._server(capacity),
            tiers=self._tiers(capacity),
            promised=_promised(capacity),
            slots=slots,
            adapters=adapters,
            sessions=sessions,
            file=_file(desired),
            declared=tuple(map(_declared, desired.entries)),
            loads=tuple(map(self._load, self.loads.latest_first())),
            events=self._events(),
            left_out={
                "slots": len(cache.layout.slots) - len(slots),
                "adapters": len(cache.residency.names) - known,
                "sessions": len(cache.sessions) - len(sessions),
                "declared": sum(desired.counts.values()) - len(desired.entries),
                "lost": max(0, len(capacity.restore_failures) - Most.LOST),
            },
            certificates=dict(self.files.certificates()),
            not_in_force={what: why[:_MOST_CHARACTERS] for what, why in self.files.not_in_force().items()},
        )

    def _server(self, capacity: Capacity) -> shown.Server:
        cache, facts = self.cache, self.facts
        return shown.Server(
            host=facts.host,
            version=facts.version,
            epoch=str(cache.layout.epoch),
            generation=cache.layout.generation,
            readiness=self._readiness(capacity),
            uptime_seconds=self._now - self.started,
            device=facts.device,
            kernel=facts.kernel,
            slot_bytes=capacity.slot_bytes,
            slot_dtype=cache.device.slot_dtype,
            max_rank=cache.device.max_rank,
            eviction=facts.eviction,
            planes=facts.planes,
            model_sites=len(cache.model.sites) if cache.model is not None else 0,
        )

    def _readiness(self, capacity: Capacity) -> str:
        phase = self.phase()
        if phase is not Phase.SERVING:
            return str(phase)
        if self.cache.model is None:
            return "waits for a ModelSpec"
        return f"ready, {capacity.restoring} names are still coming back" if capacity.restoring else "ready"

    def _tiers(self, capacity: Capacity) -> tuple[shown.Tier, ...]:
        layout, size = self.cache.layout, capacity.slot_bytes
        filled = len(layout.slots) - capacity.slots[SlotState.FREE]
        residents = len(layout.in_state(SlotState.OCCUPIED, SlotState.DRAINING))
        device = shown.Tier("device", filled * size, len(layout.slots) * size, capacity.pinned * size, residents)
        return (
            device,
            *(
                shown.Tier(name, use.used_bytes, use.capacity_bytes, use.held_bytes, use.adapters)
                for name, use in (("host", capacity.host), ("disk", capacity.disk))
            ),
        )

    # Slots

    def _slots(self) -> Iterator[shown.Slot]:
        residency = self.cache.residency
        for index, slot in enumerate(islice(self.cache.layout.slots, Most.SLOTS)):
            place = SlotId(index)
            owners = residency.pins.of(place)
            yield shown.Slot(
                index=index,
                state=slot.state.value,
                names=self._names_of(slot.digest),
                digest=slot.digest.short if slot.digest is not None else "",
                mod_generation=slot.mod_generation,
                used_seconds=self._used_seconds(place) if slot.digest is not None else None,
                pin_count=len(owners),
                pins=tuple(map(self._pin, heapq.nsmallest(Most.PINS, islice(owners, _MOST_ORDERED), key=_order))),
            )

    def _names_of(self, digest: Digest | None) -> tuple[str, ...]:
        named = self.cache.residency.names.named(digest) if digest is not None else frozenset()
        return tuple(map(str, heapq.nsmallest(Most.REFS, named)))

    def _used_seconds(self, slot: SlotId) -> float | None:
        return self.uses.seconds_since(self.cache.residency.slots.uses.last(slot), self._now)

    def _pin(self, owner: PinOwner) -> shown.Pin:
        session = self.cache.sessions.peek(owner.session)
        name = session.terms.client_name if session is not None else ""
        if isinstance(owner, MappingOwner):
            return shown.Pin(owner.session.short, name, "mapping", owner.mapping_id)
        return shown.Pin(owner.session.short, name, "hold", owner.hold_id)

    # Adapters

    def _adapters(self) -> Iterator[shown.Adapter]:
        """Those in slots, the latest used first, then those that something happened to, then others by their names."""
        names = self.cache.residency.names
        wanted: dict[AdapterName, None] = {}
        for digest in self.cache.residency.residents():
            if len(wanted) >= Most.ADAPTERS:
                break
            wanted |= dict.fromkeys(sorted(names.named(digest)))
        happened = self.names.latest_first()
        wanted |= dict.fromkeys(name for name in happened if names.get(name) is not None)
        strange = [name for name in happened if names.get(name) is None and self.names.failure(name) is not None]
        if len(wanted) < Most.ADAPTERS:
            wanted |= dict.fromkeys(names.first(Most.ADAPTERS))
        for name in islice(wanted, Most.ADAPTERS):
            yield self._adapter(name)
        for name in strange[: Most.REFUSED]:
            yield shown.Adapter(str(name), "none", failure=self.names.failure(name))

    def _adapter(self, name: AdapterName) -> shown.Adapter:
        resident = self.cache.residency.describe(AdapterRef(name))
        adapter, slot = resident.adapter, resident.slot
        return shown.Adapter(
            name=str(name),
            tier=self._tier(adapter.digest, slot, resident.source),
            digest=adapter.digest.short,
            slot=slot,
            rank=adapter.rank,
            bytes=adapter.bytes,
            keep=resident.keep,
            pins=resident.pins,
            used_seconds=self._used_seconds(slot) if slot is not None else None,
            history=tuple(digest.short for digest in resident.history),
            left=self.names.left(name) if slot is None else None,
            failure=self.names.failure(name),
        )

    def _tier(self, digest: Digest, slot: SlotId | None, source: str) -> str:
        """The fastest tier that has the adapter."""
        tiers = self.cache.tiers
        if slot is not None:
            return "device"
        if digest in tiers.host:
            return "host"
        if digest in tiers.disk:
            return "disk"
        return "source" if source else "gone"

    # Sessions

    def _sessions(self) -> Iterator[shown.Session]:
        for session in islice(self.cache.sessions, Most.SESSIONS):
            yield self._session(session)

    def _session(self, session: Session) -> shown.Session:
        cache, session_id = self.cache, session.session_id
        holds = cache.residency.holds.of_session(session_id)
        latest = heapq.nlargest(Most.MAPPINGS, session.mappings.values(), key=lambda each: each.generation)
        return shown.Session(
            session=session_id.short,
            client_name=session.terms.client_name,
            grace_seconds=None if session.expires_at is None else max(0.0, session.expires_at - self._now),
            ranks=session.terms.ranks,
            joined=len(session.joined),
            planes=tuple(sorted({*session.planes.values()})) or ("stream",),
            reserved_slots=session.terms.reserved_slots,
            forwards_in_flight=cache.running(session),
            mapping_count=len(session.mappings),
            mappings=tuple(self._mapping(session, mapping) for mapping in latest),
            hold_count=len(holds),
            holds=tuple(map(self._hold, holds[: Most.MAPPINGS])),
        )

    def _mapping(self, session: Session, mapping: Mapping) -> shown.MappingRow:
        residency = self.cache.residency
        owner = MappingOwner(session.session_id, mapping.mapping_id)
        refs = dict.fromkeys(entry.ref for entry in mapping.entries.table if entry is not None)
        return shown.MappingRow(
            mapping_id=mapping.mapping_id,
            generation=mapping.generation,
            refs=tuple(map(_short_ref, islice(refs, Most.REFS))),
            ref_count=len(refs),
            slots=tuple(heapq.nsmallest(Most.REFS, mapping.slots)),
            is_pinned=not mapping.slots or any(owner in residency.pins.of(slot) for slot in mapping.slots),
            is_current=residency.layout.is_current(mapping.slots, mapping.generation),
            idle_seconds=max(0.0, self._now - session.last_used.get(mapping.mapping_id, self._now)),
        )

    def _hold(self, hold: Hold) -> shown.Hold:
        left = None if hold.expires_at is None else max(0.0, hold.expires_at - self._now)
        return shown.Hold(hold.owner.hold_id, _short_ref(hold.ref), hold.slot, left)

    # What happened

    def _load(self, load: Timed) -> shown.Load:
        names = self._names_of(load.digest)
        return shown.Load(names[0] if names else "", load.digest.short, load.started, load.stages)

    def _events(self) -> tuple[shown.Event, ...]:
        log = self.cache.events
        return tuple(
            shown.Event(
                event.number,
                event.time,
                event.kind.value,
                event.generation,
                str(event.name or ""),
                event.digest.short if event.digest is not None else "",
                event.slot,
                event.session.short if event.session is not None else "",
                _cut(event.reason),
            )
            for event in reversed(log.since(log.next_number - Most.EVENTS))
        )


def _order(owner: PinOwner) -> tuple[str, bool, int]:
    is_hold = not isinstance(owner, MappingOwner)
    return owner.session.short, is_hold, owner.hold_id if not isinstance(owner, MappingOwner) else owner.mapping_id


def _short_ref(ref: AdapterRef) -> str:
    return f"{ref.name}@{ref.digest.short}" if ref.digest is not None else str(ref.name)


def _cut(text: str) -> str:
    """The beginning of what may be long."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def _promised(capacity: Capacity) -> shown.Promised:
    lost: Iterable[tuple[AdapterRef, str]] = islice(capacity.restore_failures.items(), Most.LOST)
    return shown.Promised(
        slots={state.value: count for state, count in capacity.slots.items()},
        pinned=capacity.pinned,
        reserved=capacity.reserved,
        available=capacity.available,
        keeps=capacity.keeps,
        waiting=capacity.waiting,
        adapters=capacity.adapters[0],
        most_adapters=capacity.adapters[1],
        sessions=capacity.sessions[0],
        most_sessions=capacity.sessions[1],
        restoring=capacity.restoring,
        lost={_short_ref(ref): _cut(why) for ref, why in lost},
    )


def _file(desired: DesiredStatus) -> shown.DeclaredFile | None:
    file = desired.file
    if file is None:
        return None
    counts = {state.value: count for state, count in desired.counts.items()}
    cause = _cut(f"{file.cause.reason}: {file.cause.message}") if file.cause is not None else ""
    return shown.DeclaredFile(file.path, file.version[:19], counts, cause)


def _declared(entry: EntryStatus) -> shown.Declared:
    return shown.Declared(
        name=_cut(entry.name),
        place=_cut(entry.place),
        wanted=entry.want.state.value if entry.want is not None else "",
        state=entry.state.value,
        reason=str(entry.cause.reason) if entry.cause is not None else "",
        cause=_cut(entry.cause.message) if entry.cause is not None else "",
        attempts=entry.attempts,
        next_try_seconds=entry.next_try_seconds,
        since_seconds=entry.since_seconds,
    )
