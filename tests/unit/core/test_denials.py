"""Who is refused again and again fills no log, and no refusal goes without being counted."""

from __future__ import annotations

from collections.abc import Mapping

from slotcar_sidecar.core.denials import Denials


def test_a_flood_is_told_a_few_times_a_second_and_counted() -> None:
    """To see it fail: tell of each."""
    now, told = [0.0], list[Mapping[str, object]]()
    denials = Denials(lambda: now[0], told.append)
    for _ in range(100):
        denials.tell("rude", {"method": "Forward"})
    denials.tell("polite", {"method": "Forward"})
    assert told == [{"method": "Forward"}] * 6
    now[0] = 1.0
    denials.tell("rude", {"method": "Forward"})
    assert told[-1] == {"method": "Forward", "untold": 95}


def test_what_was_not_told_of_a_burst_is_told_when_it_is_over() -> None:
    now, told = [0.0], list[Mapping[str, object]]()
    denials = Denials(lambda: now[0], told.append)
    for number in range(100):
        denials.tell("rude", {"number": number})
    denials.tell("polite", {"number": 0})
    del told[:]
    denials.look()
    assert told == []
    now[0] = 1.0
    denials.look()
    assert told == [{"number": 99, "untold": 94}]
    for _ in range(100):
        denials.tell("rude", {})
    assert len(told) == 5
    now[0] = 2.0
    denials.look()
    now[0] = 3.0
    denials.look()
    assert (len(told), denials._windows) == (6, {})
