"""The state of the model: immutable values, equal when nothing that anybody can do or see differs."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from slotcar_sidecar.core.ids import Digest, Epoch, SlotId
from slotcar_sidecar.core.layout import Layout, SlotState

T = TypeVar("T")

READS = 2
EMPTY, TORN = "empty", "torn"
READABLE = (SlotState.OCCUPIED, SlotState.DRAINING)
DIGESTS = {letter: Digest("sha256:" + letter.lower() * 64) for letter in "ABC"}
_LETTERS = {digest: letter for letter, digest in DIGESTS.items()}


def letter(layout: Layout, slot: SlotId) -> str:
    """The digest of a slot, as one letter; empty when it has none."""
    digest = layout[slot].digest
    return _LETTERS[digest] if digest is not None else ""


class Bounds(NamedTuple):
    """How much may still happen; an event is a failed fill, an unload, a force, the end of pins or of the process."""

    fills: int
    maps: int
    calls: int
    events: int


class Life(NamedTuple):
    """What one process shows to readers: the words, and the parts and bytes of the slots."""

    layout: Layout
    bytes: tuple[str, ...]
    words: tuple[int, ...]
    parts: tuple[str, ...]
    closed: bool = False

    @classmethod
    def new(cls, epoch: Epoch, slots: int) -> Life:
        return cls(Layout.empty(epoch, slots), (EMPTY,) * slots, (0,) * slots, (EMPTY,) * slots)


class Mapping(NamedTuple):
    """What SetMapping reported. The last two are for the oracle: a force ended it; it maps a digest that came back."""

    digest: str
    slot: SlotId
    epoch: Epoch
    generation: int
    forced: bool = False
    returned: bool = False


class Fill(NamedTuple):
    """What the writer is at, with the number of acts done."""

    slot: SlotId
    digest: str
    done: int = 0


class Forward(NamedTuple):
    """A call: the mapping it uses and the digest that was reported for it, the acts done, and what was read.

    `passed` is what the second check found, if it was made before completion. A direct reader computes with `parts`,
    which it reads first, or has kept.
    """

    mapping: Mapping
    expected: str
    done: int = 0
    seen: tuple[str, ...] = ()
    passed: bool | None = None
    reads_parts: bool = False
    parts: str = ""

    @property
    def complete(self) -> bool:
        return len(self.seen) == READS


class State(NamedTuple):
    """Everything. The last three are a direct client's: the memory of a dead process that it has still mapped; whether
    the sidecar ended its session; the parts that it has read and keeps, and of which slot.
    """

    life: Life
    left: Bounds
    up: bool = True
    fill: Fill | None = None
    mapping: Mapping | None = None
    pinned: bool = False
    marks: frozenset[SlotId] = frozenset()
    forward: Forward | None = None
    connected: bool = True
    old: Life | None = None
    ended: bool = False
    kept: tuple[SlotId, str] | None = None

    @property
    def layout(self) -> Layout:
        return self.life.layout

    @property
    def view(self) -> Life:
        """What the reader reads."""
        return self.old or self.life

    def pins(self, slot: SlotId) -> bool:
        return self.pinned and self.mapping is not None and self.mapping.slot == slot

    def can_pin(self) -> bool:
        """Whether the client's mapping is current, and its digest still in its slot."""
        mapping, layout = self.mapping, self.layout
        if mapping is None or mapping.epoch != layout.epoch or layout[mapping.slot].state not in READABLE:
            return False
        current = layout.is_current((mapping.slot,), mapping.generation)
        return current and letter(layout, mapping.slot) == mapping.digest

    def publish(self, layout: Layout) -> State:
        """The words follow, in one step for all that anybody can see."""
        words = tuple([slot.mod_generation for slot in layout.slots])
        return self._replace(life=self.life._replace(layout=layout, words=words))

    def write(self, slot: SlotId, content: str) -> State:
        return self._replace(life=self.life._replace(bytes=_changed(self.life.bytes, slot, content)))

    def write_parts(self, slot: SlotId, content: str) -> State:
        return self._replace(life=self.life._replace(parts=_changed(self.life.parts, slot, content)))

    def write_word(self, slot: SlotId, word: int) -> State:
        return self._replace(life=self.life._replace(words=_changed(self.life.words, slot, word)))

    def unmark(self, slot: SlotId) -> State:
        return self._replace(marks=self.marks - {slot})

    def end_pins(self) -> State:
        """A slot that only the mapping kept, because no name has its digest, is freed."""
        ended = self._replace(pinned=False)
        if self.pinned and self.mapping and self.layout[self.mapping.slot].state is SlotState.DRAINING:
            return ended.publish(self.layout.release(self.mapping.slot))
        return ended

    def after_event(self) -> State:
        return self._replace(left=self.left._replace(events=self.left.events - 1))


def _changed(before: tuple[T, ...], slot: SlotId, content: T) -> tuple[T, ...]:
    return (*before[:slot], content, *before[slot + 1 :])


class Step(NamedTuple):
    """A transition; `reached` says what makes it interesting, `broken` which invariants it violates."""

    name: str
    after: State
    reached: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
