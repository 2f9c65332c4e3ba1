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
    WRITE_WORD = auto()
    SEE_NO_MARK = auto()
    WRITE_PARTS = auto()
    BEGIN_WRITE = auto()
    END_WRITE = auto()
    PUBLISH_OCCUPIED = auto()
    MARK = auto()
    READ_PARTS = auto()
    CHECK_PARTS = auto()
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
    writes_word_first: bool = True  # else when the slot's bytes are written, just before it is published occupied
    writes_word_whole: bool = True  # else zeros first, as struct.pack_into does
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
    reads_region_word: bool = True
    polls_socket: bool = True
    takes_equal_generations: bool = True  # else only slots that began to change before the mapping's generation
    checks_parts: bool = True
    reads_parts_for_each_mapping: bool = True  # else once for each slot
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

    def writer_acts(self, plane: Plane) -> tuple[Act, ...]:
        acts = [Act.BEGIN_WRITE, Act.END_WRITE]
        acts.insert(2 if self.occupies_after_writing else 1, Act.PUBLISH_OCCUPIED)
        acts.insert(0 if self.publishes_before_writing else 1, Act.PUBLISH_FILLING)
        if self.waits_for_marks:
            acts.insert(int(self.publishes_before_waiting and self.publishes_before_writing), Act.SEE_NO_MARK)
        if plane is Plane.DIRECT:
            acts.insert(acts.index(Act.BEGIN_WRITE), Act.WRITE_PARTS)
            if not self.writes_word_first:
                acts.insert(acts.index(Act.END_WRITE) + 1, Act.WRITE_WORD)
            elif not self.writes_word_whole:
                acts.insert(acts.index(Act.PUBLISH_FILLING) + 1, Act.WRITE_WORD)
        return tuple(acts)

    def reader_acts(self, plane: Plane, *, reads_parts: bool) -> tuple[Act, ...]:
        """Up to the launch; `reads_parts` for a direct reader that does not know its mapping's yet."""
        acts = [Act.CHECK] if self.checks_first else []
        if plane is Plane.SIDECAR:
            acts.insert(0 if self.marks_first else len(acts), Act.MARK)
        elif reads_parts:
            acts = [Act.READ_PARTS, *([Act.CHECK_PARTS] if self.checks_parts else []), *acts]
        return (*acts, Act.LAUNCH)


RULES = tuple(field.name for field in fields(Rules))
