"""Whom the owner waits for before a slot is written, and before a Fence returns."""

from __future__ import annotations

from slotcar_sidecar.core.ids import SlotId
from slotcar_sidecar.core.marks import Mark, Marks

SLOTS = frozenset({SlotId(1), SlotId(3)})


def thread_of(marks: Marks) -> Mark:
    """A thread whose owner looks as soon as it is told."""
    mark = Mark(marks.look)
    marks.add(mark)
    return mark


def test_nobody_is_waited_for_when_nobody_reads() -> None:
    marks, told = Marks(), list[str]()
    mark = thread_of(marks)
    mark.begin("a session", SLOTS)
    marks.when_unread(SlotId(2), lambda: told.append("unread"))
    marks.when_ended("another session", lambda: told.append("ended"))
    assert told == ["unread", "ended"]


def test_a_slot_is_unread_when_its_last_reader_is_gone() -> None:
    marks, told = Marks(), list[str]()
    first, second = thread_of(marks), thread_of(marks)
    first.begin("a", SLOTS)
    second.begin("b", SLOTS)
    with marks.reading(SLOTS):
        marks.when_unread(SlotId(3), lambda: told.append("unread"))
        first.end()
        second.end()
        assert marks.is_read(SlotId(3))
        assert told == []
    assert told == ["unread"]
    assert not marks.is_read(SlotId(3))


def test_a_thread_that_ends_is_waited_for_no_more() -> None:
    marks, told = Marks(), list[str]()
    mark = thread_of(marks)
    mark.begin("a", SLOTS)
    marks.when_unread(SlotId(1), lambda: told.append("unread"))
    marks.when_ended("a", lambda: told.append("ended"))
    marks.remove(mark)
    assert told == ["unread", "ended"]


def test_only_what_was_under_way_is_waited_for() -> None:
    """Two ranks of a session that read in turns without a gap keep no Fence waiting for ever."""
    marks, told = Marks(), list[str]()
    first, second = thread_of(marks), thread_of(marks)
    first.begin("session", SLOTS)
    marks.when_ended("session", lambda: told.append("ended"))
    second.begin("session", SLOTS)
    assert told == []
    first.end()
    assert told == ["ended"]


def test_the_next_reading_of_a_thread_is_another() -> None:
    """The owner is late: it looks when the thread has begun the next."""
    marks, told = Marks(), list[str]()
    mark = Mark(lambda: None)
    marks.add(mark)
    mark.begin("session", SLOTS)
    marks.when_ended("session", lambda: told.append("ended"))
    mark.end()
    mark.begin("session", SLOTS)
    marks.look()
    assert told == ["ended"]
