"""What is promised of reservations, for any table of who protects what."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.reservations import Party, common_use, is_within_reservation, owed

SESSIONS = [SessionId(name) for name in ("one", "two", "three")]
parties = st.sampled_from([None, SessionId("reserved nothing"), *SESSIONS])


def test_without_reservations_every_protected_slot_counts_once() -> None:
    table = [frozenset({SESSIONS[0], SESSIONS[1]}), frozenset({None, SESSIONS[0]}), frozenset({SESSIONS[2]})]
    assert common_use(table, {}) == 3


def test_what_is_beyond_the_reservation_is_common() -> None:
    one, two, _ = SESSIONS
    table = [frozenset({one}), frozenset({one}), frozenset({one, two}), frozenset({two})]
    assert common_use(table, {one: 1}) == 3
    assert common_use(table, {one: 2}) == 2
    assert common_use(table, {one: 2, two: 2}) == 1


def test_two_sessions_may_owe_for_what_a_third_releases() -> None:
    """The slot that all three had counts twice when the one without a reservation leaves it; nothing more is owed."""
    one, two, three = SESSIONS
    reserved = {one: 1, two: 1}
    before = [frozenset({one}), frozenset({two}), frozenset({one, two, three})]
    after = [frozenset({one}), frozenset({two}), frozenset({one, two})]
    assert (common_use(before, reserved), owed(before, reserved)) == (1, 3)
    assert (common_use(after, reserved), owed(after, reserved)) == (2, 3)


class Reservations(RuleBasedStateMachine):
    """Parties take slots, share them and release them in any order; what they may is asked as Slots.check asks."""

    @initialize(slots=st.integers(2, 6), reserved=st.lists(st.integers(0, 3), min_size=3, max_size=3))
    def start(self, slots: int, reserved: list[int]) -> None:
        self.table: list[frozenset[Party]] = [frozenset()] * slots
        self.reserved: dict[SessionId, int] = {}
        for session, count in zip(SESSIONS, reserved, strict=True):
            if count and sum(self.reserved.values()) + count <= slots:
                self.reserved[session] = count

    def protected(self) -> list[frozenset[Party]]:
        return [slot for slot in self.table if slot]

    @rule(party=parties, data=st.data())
    def take(self, party: Party, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.table) - 1))
        before = self.table[index]
        self.table[index] = before | {party}
        protected = self.protected()
        if is_within_reservation(party, protected, self.reserved):
            return
        if common_use(protected, self.reserved) + sum(self.reserved.values()) > len(self.table):
            self.table[index] = before

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        taken = [(index, party) for index, slot in enumerate(self.table) for party in sorted(slot, key=str)]
        if taken:
            index, party = data.draw(st.sampled_from(taken))
            self.table[index] -= {party}

    @rule(session=st.sampled_from(SESSIONS), releases=st.booleans())
    def end(self, session: SessionId, releases: bool) -> None:
        """What a call of a session that ended still protects is nobody's reservation any more."""
        self.reserved.pop(session, None)
        if releases:
            self.table = [slot - {session} for slot in self.table]

    @rule(session=st.sampled_from(SESSIONS), count=st.integers(1, 3))
    def reserve(self, session: SessionId, count: int) -> None:
        if session in self.reserved or any(session in slot for slot in self.table):
            return
        used = common_use(self.protected(), self.reserved)
        if used + sum(self.reserved.values()) + count <= len(self.table):
            self.reserved[session] = count

    @invariant()
    def what_is_reserved_is_there(self) -> None:
        protected = self.protected()
        assert owed(protected, self.reserved) <= len(self.table)
        for session, count in self.reserved.items():
            if sum(session in slot for slot in protected) < count:
                assert len(protected) < len(self.table)


Reservations.TestCase.settings = settings(max_examples=300, stateful_step_count=30)
TestReservations = Reservations.TestCase
