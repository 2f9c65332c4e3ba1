"""A folded sequence is the sequence that it stands for, and does its work once for each different element."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from slotcar_sidecar.core.folded import Folded

ELEMENTS = st.lists(st.sampled_from(["a", "b", "c", None]), max_size=12)


@given(ELEMENTS)
def test_it_is_the_sequence_that_it_stands_for(elements: list[str | None]) -> None:
    folded = Folded.of(elements)
    assert list(folded) == elements
    assert len(folded) == len(elements)
    assert [folded[index] for index in range(-len(elements), len(elements))] == elements * 2
    assert folded[1:3] == tuple(elements[1:3])
    assert folded.table == tuple(dict.fromkeys(elements))
    assert Folded.of(folded) is folded


@given(ELEMENTS, ELEMENTS)
def test_equal_sequences_are_equal_however_they_are_folded(one: list[str | None], other: list[str | None]) -> None:
    loose = Folded([*other, "never used"], range(len(other)))
    assert (Folded.of(one) == Folded.of(other)) == (one == other)
    assert (Folded.of(one) == loose) == (one == other)
    assert one != other or hash(Folded.of(one)) == hash(loose)


@given(ELEMENTS)
def test_a_change_is_made_once_for_each_different_element(elements: list[str | None]) -> None:
    seen: list[str | None] = []

    def doubled(element: str | None) -> str:
        seen.append(element)
        return 2 * str(element)

    assert list(Folded.of(elements).map(doubled)) == [2 * str(element) for element in elements]
    assert seen == list(dict.fromkeys(elements))
