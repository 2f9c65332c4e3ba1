"""Slots: which digest each has, who protects it, and which one gives way to a new adapter.

Invariants: a protected slot is never taken; what sessions reserved is left to them (see reservations); calls that wait
for slots get theirs before any newcomer, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from slotcar_sidecar.core.errors import SlotsExhausted
from slotcar_sidecar.core.ids import Digest, SessionId, SlotId
from slotcar_sidecar.core.layout import Layout, SlotState
from slotcar_sidecar.core.pins import PinOwner, Pins
from slotcar_sidecar.core.policy import Eviction, Uses
from slotcar_sidecar.core.reservations import Party, common_use, is_within_reservation, owed

_RETRY_SECONDS = 1.0
READABLE = (SlotState.OCCUPIED, SlotState.DRAINING)


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A load under way keeps its digest from being forgotten.

    `slot`: and its slot from being taken, until it leaves that by force or because its fill failed. `bytes`: and its
    bytes from being dropped. `resolves`: and `name@digest` goes on to resolve in its session, unless an unload by force
    ends that.
    """

    party: Party
    slot: bool = True
    bytes: bool = False
    resolves: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What a call wants of the slots: `pins` to stand, `fills` slots to write, for `party`, in its `turn`.

    `joins` are slots that others fill and that the call will pin.
    """

    what: str
    party: Party
    pins: Pins
    fills: int
    turn: object | None = None
    joins: frozenset[SlotId] = frozenset()


class Slots:
    """The layout with its pins, claims and reservations."""

    def __init__(self, layout: Layout, kept: Callable[[], set[Digest]], eviction: Eviction = Eviction.LRU) -> None:
        self._layout = layout
        self.uses = Uses(len(layout.slots), eviction)
        self._listener: Callable[[Layout], None] = lambda _: None
        self.pins = Pins()
        self.reserved: dict[SessionId, int] = {}
        self.queue: deque[object] = deque()
        self._kept = kept
        self._claims: dict[Digest, set[Claim]] = {}
        self._slot_claims: dict[Digest, set[Claim]] = {}

    def __len__(self) -> int:
        return len(self.layout.slots)

    @property
    def layout(self) -> Layout:
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._layout = layout
        self._listener(layout)

    def listen(self, listener: Callable[[Layout], None]) -> None:
        """Calls `listener` with the layout of now, and with each later one in the step that makes it."""
        self._listener = listener
        listener(self._layout)

    @property
    def reserved_slots(self) -> int:
        """How many slots all sessions together reserved."""
        return sum(self.reserved.values())

    # Who protects what

    def claim(self, digest: Digest, claim: Claim) -> None:
        self._claims.setdefault(digest, set()).add(claim)
        if claim.slot:
            self._slot_claims.setdefault(digest, set()).add(claim)

    def unclaim(self, digest: Digest, claim: Claim) -> None:
        """Ends a claim. Idempotent."""
        for table in (self._claims, self._slot_claims):
            claims = table.get(digest, set())
            claims.discard(claim)
            if not claims:
                table.pop(digest, None)

    def end_resolving(self, digest: Digest) -> None:
        """No session can ask for the digest any more because a call of it waits."""
        for claim in [claim for claim in self._claims.get(digest, ()) if claim.resolves]:
            self.unclaim(digest, claim)

    def resolves(self, digest: Digest, session: SessionId) -> bool:
        """Whether a call of the session waits with the digest."""
        return any(claim.resolves and claim.party == session for claim in self._claims.get(digest, ()))

    def is_claimed(self, digest: Digest) -> bool:
        return digest in self._claims

    def claimed_bytes(self) -> set[Digest]:
        """The digests whose bytes may not be dropped because a load is under way."""
        return {digest for digest, claims in self._claims.items() if any(claim.bytes for claim in claims)}

    def protectors(self, pins: Pins | None = None) -> dict[SlotId, frozenset[Party]]:
        """Who protects each protected slot, as if `pins` stood in place of the pins of now."""
        owners, kept = (self.pins if pins is None else pins).owners, self._kept()
        table: dict[SlotId, frozenset[Party]] = {}
        for index, slot in enumerate(self.layout.slots):
            if slot.digest is None:
                continue
            parties: set[Party] = {owner.session for owner in owners.get(SlotId(index), ())}
            parties |= {claim.party for claim in self._slot_claims.get(slot.digest, ())}
            if slot.digest in kept or (slot.state is SlotState.FILLING and not parties):
                parties.add(None)
            if parties:
                table[SlotId(index)] = frozenset(parties)
        return table

    # Room

    def check(self, demand: Demand) -> None:
        """Raises SlotsExhausted unless the demand can be met now."""
        if not (demand.fills or self.reserved or self.queue):
            return
        after = self.protectors(demand.pins)
        total, party = len(self), demand.party
        for slot in demand.joins:
            after[slot] = after.get(slot, frozenset()) | {party}
        parties = [*after.values(), *[frozenset({party})] * demand.fills]
        is_within = is_within_reservation(party, parties, self.reserved)
        if len(parties) > total or not (is_within or common_use(parties, self.reserved) + self.reserved_slots <= total):
            raise self._exhausted(demand, after)
        if is_within or not self.queue or self.queue[0] is demand.turn:
            return
        if demand.fills or after.keys() - self.protectors().keys():
            raise self._behind(demand.what)

    def _behind(self, what: str) -> SlotsExhausted:
        return SlotsExhausted(
            f"calls that wait for slots come before {what}",
            retry_after_seconds=_RETRY_SECONDS,
            slots=len(self),
            waiting=len(self.queue),
        )

    def has_room(self, demand: Demand) -> bool:
        """Whether the demand can be met now."""
        try:
            self.check(demand)
        except SlotsExhausted:
            return False
        return True

    def _exhausted(self, demand: Demand, after: dict[SlotId, frozenset[Party]]) -> SlotsExhausted:
        total, party = len(self), demand.party
        others = sum(count for session, count in self.reserved.items() if session != party)
        mine = sum(party in parties for parties in after.values()) if party is not None else 0
        possible = mine + demand.fills <= total - others
        helps = possible and any(parties - {party} or party is None for parties in after.values())
        reserved = self.reserved_slots
        why = "each is pinned, kept, reserved or in a load" if reserved else "each is pinned, kept or in a load"
        if mine + demand.fills > total:
            why = f"{mine + demand.fills} are wanted at a time"
        return SlotsExhausted(
            f"none of the {total} slots can take {demand.what}: {why}",
            retry_after_seconds=_RETRY_SECONDS if helps else None,
            slots=total,
            pinned=len(demand.pins.pinned()),
            kept=len(self._kept()),
            loading=sum(slot.digest in self._claims for slot in self.layout.slots),
            reserved=reserved,
        )

    def check_keep(self, slot: SlotId | None, kept: int) -> None:
        """Raises SlotsExhausted unless `kept` names may be kept, one of them newly in `slot` (None: not there yet)."""
        total, reserved = len(self), self.reserved_slots
        limit = min(total - 1, total - reserved)
        if kept > limit:
            raise SlotsExhausted(
                f"{limit} of {total} slots may be kept: release a keep first", slots=total, kept=kept - 1, wanted=limit
            )
        if slot is not None and self.queue and slot not in self.protectors():
            raise self._behind("a keep")
        if slot is not None and self.reserved:
            after = self.protectors()
            after[slot] = after.get(slot, frozenset()) | {None}
            if common_use(after.values(), self.reserved) > total - reserved:
                raise SlotsExhausted("the other slots are reserved", slots=total, reserved=reserved)

    def reserve(self, session: SessionId, count: int, kept: int) -> None:
        """Reserves slots for a new session. Raises SlotsExhausted when others have them."""
        total, reserved = len(self), self.reserved_slots
        if not count:
            return
        if self.queue:
            raise self._behind("a reservation")
        used = common_use(self.protectors().values(), self.reserved)
        if max(used, kept) + reserved + count > total:
            raise SlotsExhausted(
                f"{count} of {total} slots cannot be reserved: {reserved} are reserved, {kept} kept, {used} in use",
                retry_after_seconds=_RETRY_SECONDS if kept + reserved + count <= total else None,
                slots=total,
                reserved=reserved,
                wanted=count,
                kept=kept,
            )
        self.reserved[session] = count

    def available(self) -> int:
        """How many slots loads without a session could take now."""
        after, total = self.protectors(), len(self)
        common = total - self.reserved_slots - common_use(after.values(), self.reserved)
        return max(0, min(total - len(after), common))

    # Taking

    def take(self, digest: Digest, idle_since: int | None = None) -> tuple[SlotId, Digest | None]:
        """Begins to fill a slot with the digest; returns it with the digest that gives way. The room was checked.

        `idle_since`: nothing gives way that was used after this moment of `uses`. Raises SlotsExhausted if all was.
        """
        candidates = self._candidates()
        if idle_since is not None and candidates:
            candidates = self.uses.idle(candidates, idle_since)
        slot = self.uses.victim(candidates)
        if slot is None:
            raise SlotsExhausted("every slot was used since the call came", slots=len(self))
        victim = self.layout[slot].digest
        self.layout = self.layout.begin_fill(slot, digest)
        self.uses.enter(slot, digest)
        return slot, victim

    def _candidates(self) -> Sequence[SlotId]:
        protected = self.protectors()
        return self.layout.in_state(SlotState.FREE) or [
            slot for slot in self.layout.in_state(*READABLE) if slot not in protected
        ]

    def occupy(self, slot: SlotId) -> None:
        self.layout = self.layout.occupy(slot)

    def release(self, slot: SlotId) -> None:
        """Frees a slot that nobody uses, or whose fill failed."""
        self._end_slot_claims(slot)
        self.layout = self.layout.release(slot)

    def drain(self, slot: SlotId) -> None:
        self.layout = self.layout.drain(slot)

    def revive(self, slot: SlotId) -> None:
        self.layout = self.layout.revive(slot)

    def invalidate(self, slot: SlotId) -> None:
        """Frees a slot by force: nobody pins it any more, and what used it is stale."""
        self._end_slot_claims(slot)
        self.layout = self.layout.invalidate(slot)
        self.pins = self.pins.end(slot)

    def _end_slot_claims(self, slot: SlotId) -> None:
        """The digest leaves its slot: whoever brings it into one again does so in its own party's room."""
        digest = self.layout[slot].digest
        if digest is not None:
            self._slot_claims.pop(digest, None)

    def advance(self) -> None:
        """Moves to the next generation though no slot changes."""
        self.layout = self.layout.advance()

    # Pins

    def unpin(self, owners: Collection[PinOwner]) -> frozenset[SlotId]:
        """The owners pin nothing any more; returns what nobody pins now."""
        before = self.pins
        self.pins = before.without(owners)
        return before.pinned() - self.pins.pinned()

    def pin(self, owner: PinOwner, slots: Iterable[SlotId]) -> frozenset[SlotId]:
        """`owner` pins exactly `slots`; returns what nobody pins any more."""
        before = self.pins
        self.pins = before.replace(owner, slots)
        return before.pinned() - self.pins.pinned()

    def check_integrity(self) -> None:
        """Asserts the invariants of the layout, the pins and the reservations."""
        self.layout.check_integrity()
        for slot in self.pins.pinned():
            assert self.layout[slot].state in READABLE, f"slot {slot} is pinned and {self.layout[slot].state}"
        for slot in self.layout.in_state(SlotState.DRAINING):
            digest = self.layout[slot].digest
            assert self.pins.of(slot) or digest in self._claims, f"slot {slot} drains for nobody"
        assert all(self._claims.values())
        assert owed(self.protectors().values(), self.reserved) <= len(self), "the reservations"
