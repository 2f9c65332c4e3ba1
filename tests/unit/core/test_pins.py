"""Pins are sets of owners: doing anything twice is doing it once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from slotcar_sidecar.core.ids import SessionId, SlotId
from slotcar_sidecar.core.pins import MappingOwner, Pins

S0, S1, S2 = map(SlotId, range(3))
A, B = MappingOwner(SessionId("s"), 1), MappingOwner(SessionId("s"), 2)

owners = st.sampled_from([A, B, MappingOwner(SessionId("t"), 1)])
slots = st.frozensets(st.sampled_from([S0, S1, S2]))


def test_an_owner_pins_exactly_what_it_said_last() -> None:
    pins = Pins().replace(A, [S0, S1]).replace(B, [S1]).replace(A, [S2])
    assert pins.of(S0) == frozenset()
    assert pins.of(S1) == {B}
    assert pins.of(S2) == {A}
    assert pins.pinned() == {S1, S2}


def test_a_double_release_or_a_release_by_a_stranger_changes_nothing() -> None:
    pins = Pins().replace(A, [S0])
    assert pins.replace(B, ()) == pins
    assert pins.replace(A, ()).replace(A, ()) == Pins()


def test_end_takes_every_owner() -> None:
    pins = Pins().replace(A, [S0, S1]).replace(B, [S0]).end(S0)
    assert pins.of(S0) == frozenset()
    assert pins.of(S1) == {A}


@given(st.lists(st.tuples(owners, slots), max_size=20))
def test_agrees_with_a_table_of_last_words(steps: list[tuple[MappingOwner, frozenset[SlotId]]]) -> None:
    pins, last = Pins(), {}
    for owner, wanted in steps:
        pins, last[owner] = pins.replace(owner, wanted), wanted
    for slot in (S0, S1, S2):
        assert pins.of(slot) == {owner for owner, wanted in last.items() if slot in wanted}
    assert pins.pinned() == frozenset().union(*last.values())
