"""The reader/writer rule as single rules, each of which can be taken away."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum, auto


class Plane(Enum):
    """Where the reader is."""

    SIDECAR = "sidecar"
    DIRECT = "direct"


class Act(Enum):
    """What the writer and the reader do, in an order that follows from the rules."""

    PUBLISH_FILLING = auto()
    SEE_NO_MARK = auto()
    BEGIN_WRITE = auto()
    END_WRITE = auto()
    PUBLISH_OCCUPIED = auto()
    MARK = auto()
    CHECK = auto()
    LAUNCH = auto()


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds in slotcar; a comment says what is done instead where that is not plain."""

    # The writer
    fill_sets_mod_generation: bool = True
    publishes_before_waiting: bool = True
    publishes_before_writing: bool = True
    waits_for_marks: bool = True
    occupies_after_writing: bool = True
    respects_pins: bool = True
    one_slot_per_digest: bool = True
    # The reader
    checks_first: bool = True
    marks_first: bool = True  # else between the first check and the launch
    marks_until_completion: bool = True  # else until the launch has returned
    unmarks_when_refused: bool = True
    checks_again: bool = True
    checks_again_after_completion: bool = True  # else at any time after the launch
    compares_slots: bool = True
    compares_generations: bool = True  # else the slot's digest, as the fix of vllm#47724 compares ids
    compares_epochs: bool = True
    reads_closed_word: bool = True
    polls_socket: bool = True
    # The session
    session_ends_with_process: bool = True
    call_says_generation: bool = True
    mapping_has_own_generation: bool = True
    # Operators and the process
    force_sets_mod_generation: bool = True
    restart_is_new_epoch: bool = True
    restart_makes_new_files: bool = True

    def without(self, *names: str) -> Rules:
        return replace(self, **dict.fromkeys(names, False))

    def writer_acts(self) -> tuple[Act, ...]:
        acts = [Act.BEGIN_WRITE, Act.END_WRITE]
        acts.insert(2 if self.occupies_after_writing else 1, Act.PUBLISH_OCCUPIED)
        acts.insert(0 if self.publishes_before_writing else 1, Act.PUBLISH_FILLING)
        if self.waits_for_marks:
            acts.insert(int(self.publishes_before_waiting and self.publishes_before_writing), Act.SEE_NO_MARK)
        return tuple(acts)

    def reader_acts(self, plane: Plane) -> tuple[Act, ...]:
        """Up to the launch."""
        acts = [Act.CHECK] if self.checks_first else []
        if plane is Plane.SIDECAR:
            acts.insert(0 if self.marks_first else len(acts), Act.MARK)
        return (*acts, Act.LAUNCH)


RULES = tuple(field.name for field in fields(Rules))
