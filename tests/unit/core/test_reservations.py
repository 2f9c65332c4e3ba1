"""What is promised of reservations, for any table of who protects what."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.reservations import Party, common_use

SESSIONS = [SessionId(name) for name in ("one", "two", "three")]
SLOTS = 5

parties = st.frozensets(st.sampled_from([None, *SESSIONS]), min_size=1)
tables = st.lists(parties, max_size=SLOTS)
reservations = st.dictionaries(st.sampled_from(SESSIONS), st.integers(1, SLOTS), max_size=3)


def holds(table: list[frozenset[Party]], reserved: dict[SessionId, int]) -> bool:
    return common_use(table, reserved) + sum(reserved.values()) <= SLOTS


def test_without_reservations_every_protected_slot_counts_once() -> None:
    table = [frozenset({SESSIONS[0], SESSIONS[1]}), frozenset({None, SESSIONS[0]}), frozenset({SESSIONS[2]})]
    assert common_use(table, {}) == 3


def test_what_is_beyond_the_reservation_is_common() -> None:
    one, two, _ = SESSIONS
    table = [frozenset({one}), frozenset({one}), frozenset({one, two}), frozenset({two})]
    assert common_use(table, {one: 1}) == 3
    assert common_use(table, {one: 2}) == 2
    assert common_use(table, {one: 2, two: 2}) == 1


@given(tables, reservations)
def test_a_session_below_its_reservation_finds_a_slot(
    table: list[frozenset[Party]], reserved: dict[SessionId, int]
) -> None:
    assume(holds(table, reserved))
    for session, count in reserved.items():
        if sum(session in slot for slot in table) < count:
            assert len(table) < SLOTS
            assert holds([*table, frozenset({session})], reserved)


@given(tables, reservations, st.data())
def test_no_release_breaks_a_promise(
    table: list[frozenset[Party]], reserved: dict[SessionId, int], data: st.DataObject
) -> None:
    assume(holds(table, reserved) and table)
    index = data.draw(st.integers(0, len(table) - 1))
    party = data.draw(st.sampled_from(sorted(table[index], key=str)))
    left = table[index] - {party}
    after = [*table[:index], *([left] if left else []), *table[index + 1 :]]
    assert holds(after, reserved)


@given(tables, reservations, st.sampled_from(SESSIONS))
def test_a_session_that_ends_breaks_no_promise(
    table: list[frozenset[Party]], reserved: dict[SessionId, int], session: SessionId
) -> None:
    assume(holds(table, reserved))
    after = [slot - {session} for slot in table if slot != {session}]
    assert holds(after, {other: count for other, count in reserved.items() if other != session})
