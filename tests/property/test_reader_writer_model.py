"""Every interleaving of the reader/writer rule (I2), and what breaks when any part of the rule is taken away.

`python -m tests.property.reader_writer` prints the number of states of each configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.property.reader_writer.configurations import CONFIGURATIONS, LARGE_CONFIGURATIONS, Configuration, Event
from tests.property.reader_writer.explore import Exploration, explore
from tests.property.reader_writer.rules import RULES, Plane, Rules
from tests.property.reader_writer.state import Bounds

MIN_STATES = 20_000
LARGE_MIN_STATES = 200_000

REACHED = {
    "delivered",
    "delivered without pins",
    "delivered from a slot that is draining",
    "delivered from a slot that is free",
    "delivered after the digest came back",
    "first check: stale",
    "first check: stale, the same digest in the same slot",
    "second check: stale after right reads",
    "second check: a force ended the mapping",
    "killed in a fill",
}
REACHED_ON = {
    Plane.SIDECAR: {
        "no mapping: replaced",
        "no mapping: session of another process, another digest at a current generation",
        "second check: a writer waited",
        "killed under a Forward",
    },
    Plane.DIRECT: {
        "check of the parts: another epoch, another digest at a current generation",
        "check of the parts: stale",
        "check of the parts: the session has ended",
        "first check: closed",
        "check of the parts: the process is gone",
        "second check: stale after torn reads",
        "second check: stale, the same digest in the same slot after wrong reads",
        "second check: closed after wrong reads",
        "second check: the process is gone after torn reads",
        "second check: the session has ended after torn reads",
        "second check: the session has ended, the same digest in the same slot after wrong reads",
    },
}


def check(
    found: Exploration, configuration: Configuration, min_states: int, record: Callable[[str, object], None]
) -> None:
    print(f"{configuration}: {found}")
    record("states", found.states)
    assert not found.broken, found
    assert found.states >= min_states
    assert REACHED | REACHED_ON[configuration.plane] <= found.reached.keys()


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_the_rule_holds(configuration: Configuration, record_property: Callable[[str, object], None]) -> None:
    check(explore(configuration), configuration, MIN_STATES, record_property)


@pytest.mark.full
@pytest.mark.parametrize("configuration", LARGE_CONFIGURATIONS, ids=str)
def test_the_rule_holds_for_longer(
    configuration: Configuration, record_property: Callable[[str, object], None]
) -> None:
    check(explore(configuration), configuration, LARGE_MIN_STATES, record_property)


def one_slot(plane: Plane, *events: Event, calls: int = 1) -> Configuration:
    bounds = Bounds(fills=3, maps=2, calls=calls, events=1)
    return Configuration(plane, 1, "AC", bounds, frozenset(events or Event))


def two_slots(plane: Plane) -> Configuration:
    return Configuration(plane, 2, "AC", Bounds(fills=2, maps=2, calls=1, events=1))


class Missing(NamedTuple):
    """Rules that are taken away together, and all that breaks within the bounds."""

    plane: Plane
    rules: str
    broken: str

    def __str__(self) -> str:
        return f"{self.plane.value}-{self.rules.replace(' ', '+')}"


# In the sidecar I8 is held twice: by the marks that the writer waits for, and by the second check. The marks alone hold
# I2, the second check alone holds back what became stale meanwhile.
MISSING_IN_SIDECAR = [
    ("fill_sets_mod_generation", "I2 I8"),
    ("publishes_before_waiting", "I2 PINS"),
    ("publishes_before_writing", "I1 I2 I8 PINS"),
    ("waits_for_marks", "I2"),
    ("occupies_after_writing", "I1 I2 I8"),
    ("respects_pins", "PINS"),
    ("checks_first", "I2"),
    ("marks_first", "I2"),
    ("marks_until_completion", "I2"),
    ("unmarks_when_refused", "PROGRESS"),
    ("checks_again", "STALE"),
    ("checks_again_after_completion", "STALE"),
    ("compares_slots", "I2 I8 STALE"),
    ("compares_generations", "STALE"),
    ("session_ends_with_process", "I8"),
    ("call_says_generation", "I8"),
    ("force_sets_mod_generation", "STALE"),
    ("restart_is_new_epoch", "I2 I3 I8"),
    # Without marks the second check holds I8 alone; together with any part of either the other is gone.
    ("checks_first marks_first marks_until_completion waits_for_marks", "I2"),
    ("checks_again checks_first", "I2 I8 STALE"),
    ("checks_again marks_first", "I2 I8 STALE"),
    ("checks_again marks_until_completion", "I2 I8 STALE"),
    ("checks_again waits_for_marks", "I2 I8 STALE"),
    ("checks_again publishes_before_waiting", "I2 I8 PINS STALE"),
    ("checks_again_after_completion marks_until_completion", "I2 I8 STALE"),
    ("compares_generations waits_for_marks", "I2 I8 STALE"),
    # Here the epoch decides only where sessions outlive their process.
    ("session_ends_with_process compares_epochs", "I2 I3 I8"),
]
# In a client's process the second check is all there is.
MISSING_IN_DIRECT = [
    ("fill_sets_mod_generation", "I8 PARTS"),
    ("publishes_before_waiting", "PINS"),
    ("publishes_before_writing", "I1 I8 PARTS PINS"),
    ("occupies_after_writing", "I1 I8"),
    ("respects_pins", "PINS"),
    ("writes_word_first", "I8 PARTS STALE"),
    ("writes_word_whole", "I8 PARTS STALE"),
    ("checks_again", "I3 I8 SESSION STALE"),
    ("checks_again_after_completion", "I3 I8 SESSION STALE"),
    ("compares_slots", "I8 PARTS STALE"),
    ("compares_generations", "I8 PARTS STALE"),
    ("compares_epochs", "I3 I8 PARTS"),
    ("reads_region_word", "SESSION"),
    ("polls_socket", "I3"),
    ("force_sets_mod_generation", "STALE"),
    ("restart_is_new_epoch", "I3 I8 PARTS"),
    # The first check of a unit comes after its parts were read, so it is as good as a check of their own.
    ("checks_parts checks_first", "PARTS"),
]
MISSING = [
    *(Missing(Plane.SIDECAR, *row) for row in MISSING_IN_SIDECAR),
    *(Missing(Plane.DIRECT, *row) for row in MISSING_IN_DIRECT),
]
MISSING_WITH_TWO_SLOTS = [
    Missing(Plane.SIDECAR, "one_slot_per_digest", "I4"),
    Missing(Plane.DIRECT, "one_slot_per_digest", "I4"),
    Missing(Plane.SIDECAR, "mapping_has_own_generation", "I8"),
]
MISSING_WITH_TWO_CALLS = [Missing(Plane.DIRECT, "reads_parts_for_each_mapping", "I8 PARTS")]
# All of a plane's at once. A slot is mapped when it is published as occupied, later than the generation at which it
# began to change, so that the two are never equal. A direct reader has no mark and sends no call; its first check only
# saves work; an orderly end closes the socket, too; and memory that a restart writes again is of another epoch.
NEEDLESS = {
    Plane.SIDECAR: "compares_epochs reads_closed_word reads_region_word polls_socket takes_equal_generations"
    " writes_word_first writes_word_whole checks_parts reads_parts_for_each_mapping restart_makes_new_files",
    Plane.DIRECT: "waits_for_marks checks_first marks_first marks_until_completion unmarks_when_refused"
    " session_ends_with_process call_says_generation mapping_has_own_generation reads_closed_word"
    " takes_equal_generations restart_makes_new_files",
}


@pytest.mark.parametrize("missing", MISSING, ids=str)
def test_what_a_missing_rule_breaks(missing: Missing) -> None:
    found = explore(one_slot(missing.plane), Rules().without(*missing.rules.split()))
    assert found.broken.keys() == set(missing.broken.split()), found


@pytest.mark.parametrize("missing", MISSING_WITH_TWO_SLOTS, ids=str)
def test_what_a_missing_rule_breaks_with_two_slots(missing: Missing) -> None:
    found = explore(two_slots(missing.plane), Rules().without(*missing.rules.split()))
    assert found.broken.keys() == set(missing.broken.split()), found


@pytest.mark.parametrize("missing", MISSING_WITH_TWO_CALLS, ids=str)
def test_what_a_missing_rule_breaks_with_two_calls(missing: Missing) -> None:
    found = explore(one_slot(missing.plane, calls=2), Rules().without(*missing.rules.split()))
    assert found.broken.keys() == set(missing.broken.split()), found


@pytest.mark.parametrize("make", [one_slot, two_slots])
@pytest.mark.parametrize("plane", Plane)
def test_what_a_plane_does_not_need(plane: Plane, make: Callable[[Plane], Configuration]) -> None:
    found = explore(make(plane), Rules().without(*NEEDLESS[plane].split()))
    assert not found.broken, found


def test_each_rule_is_needed_alone_or_named() -> None:
    alone = {missing.rules for missing in (*MISSING, *MISSING_WITH_TWO_SLOTS, *MISSING_WITH_TWO_CALLS)}
    named = {"reads_closed_word", "restart_makes_new_files", "takes_equal_generations", "checks_parts"}
    assert set(RULES) - alone == named


def test_the_closed_word_is_for_who_does_not_see_the_socket() -> None:
    """It tells of an orderly end; of kill -9 only the socket tells."""
    rules, orderly = Rules().without("polls_socket"), one_slot(Plane.DIRECT, Event.CLOSE)
    assert not explore(orderly, rules).broken
    assert explore(orderly, rules.without("reads_closed_word")).broken.keys() == {"I3"}
    assert explore(one_slot(Plane.DIRECT, Event.KILL), rules).broken.keys() == {"I3"}


def test_the_epoch_is_for_who_reads_memory_that_a_restart_writes_again() -> None:
    """New files are for what no check can undo: a reader that is ended because its memory was truncated."""
    found = explore(one_slot(Plane.DIRECT), Rules().without("polls_socket", "restart_makes_new_files"))
    assert found.broken.keys() == {"I3"}, found
    assert "second check: another epoch after wrong reads" in found.reached


def test_parts_that_were_kept_are_right_for_the_next_call() -> None:
    found = explore(one_slot(Plane.DIRECT, calls=2))
    assert not found.broken, found


def test_a_check_of_the_parts_alone_or_the_first_check_alone_is_enough() -> None:
    for rule in ("checks_parts", "checks_first"):
        found = explore(one_slot(Plane.DIRECT, calls=2), Rules().without(rule))
        assert not found.broken, found


def test_a_word_that_is_zero_while_it_is_written_passes_for_an_old_one() -> None:
    """A mapping that is stale already, and a second fill of its slot, whose word a reader sees half written."""
    found = explore(one_slot(Plane.DIRECT, Event.EXPIRE), Rules().without("writes_word_whole"))
    trace = found.broken["I8"]
    assert trace[-1] == "delivered"
    assert len(digests_filled(trace)) == 3
    assert "the word is written" not in trace[trace.index("launched") :][-2:], found


def test_a_reader_that_is_paused_past_its_grace_discards_what_it_read() -> None:
    """Its session ended meanwhile, and an ordinary load refilled its slot; the word of its region says so, or that of
    the slot where the region's is not read, or came too late."""
    for missing in ((), ("reads_region_word", "polls_socket")):
        found = explore(one_slot(Plane.DIRECT, Event.END), Rules().without(*missing))
        assert not {"I8", "STALE", "PARTS"} & found.broken.keys(), found
        why = "stale" if missing else "the session has ended"
        trace = found.reached[f"second check: {why} after wrong reads"]
        assert trace.index("launched") < trace.index("the session ends")
        assert digests_filled(trace) == ["A", "C"]


@pytest.mark.parametrize("plane", Plane)
def test_a_digest_that_comes_back(plane: Plane) -> None:
    """A→C→A under a mapping that lost its pins: mapped again it is computed, and before that it is refused."""
    found = explore(one_slot(plane, Event.EXPIRE))
    assert not found.broken, found
    assert digests_filled(found.reached["delivered after the digest came back"]) == ["A", "C", "A"]
    assert digests_filled(found.reached["first check: stale, the same digest in the same slot"]) == ["A", "C", "A"]


def test_digests_compared_instead_of_generations_miss_a_digest_that_comes_back() -> None:
    """vllm#47724, had its fix been used here: both checks see A, and the reads between them saw C."""
    found = explore(one_slot(Plane.DIRECT, Event.EXPIRE), Rules().without("compares_generations"))
    trace = found.reached["delivered after wrong reads"]
    assert digests_filled(trace) == ["A", "C", "A"]
    assert "the kernel reads C" in trace


def digests_filled(trace: tuple[str, ...]) -> list[str]:
    return [step.split()[3].rstrip(":") for step in trace if step.startswith("slot ") and " for " in step]


def test_a_counterexample_is_a_shortest_trace() -> None:
    found = explore(one_slot(Plane.SIDECAR, Event.EXPIRE), Rules().without("waits_for_marks"))
    assert found.broken == {
        "I2": (
            "slot 0 for A: the writer publishes filling",
            "the write begins",
            "the write ends",
            "the writer publishes occupied",
            "A is mapped",
            "a call is sent",
            "the reader marks",
            "the first check passes",
            "launched",
            "the pins end",
            "slot 0 for C: the writer publishes filling",
            "the write begins",
        )
    }
