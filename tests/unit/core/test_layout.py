"""Every state of a slot × every change, and what each change does to generations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from slotcar_sidecar.core.ids import Digest, Epoch, SlotId
from slotcar_sidecar.core.layout import Layout, Slot, SlotState

SLOT = SlotId(0)
A, B = Digest("sha256:" + "a" * 64), Digest("sha256:" + "b" * 64)

Change = Callable[[Layout], Layout]
CHANGES: dict[str, Change] = {
    "begin_fill": lambda layout: layout.begin_fill(SLOT, B),
    "occupy": lambda layout: layout.occupy(SLOT),
    "drain": lambda layout: layout.drain(SLOT),
    "revive": lambda layout: layout.revive(SLOT),
    "release": lambda layout: layout.release(SLOT),
    "invalidate": lambda layout: layout.invalidate(SLOT),
}
# (state, change) → (new state, new digest, whether mod_generation moves); a pair that is absent is refused.
FREE, FILLING, OCCUPIED, DRAINING = SlotState
TABLE = {
    (FREE, "begin_fill"): (FILLING, B, True),
    (OCCUPIED, "begin_fill"): (FILLING, B, True),
    (DRAINING, "begin_fill"): (FILLING, B, True),
    (FILLING, "occupy"): (OCCUPIED, A, False),
    (OCCUPIED, "drain"): (DRAINING, A, False),
    (DRAINING, "revive"): (OCCUPIED, A, False),
    (FILLING, "release"): (FREE, None, False),
    (OCCUPIED, "release"): (FREE, None, False),
    (DRAINING, "release"): (FREE, None, False),
    (OCCUPIED, "invalidate"): (FREE, None, True),
    (DRAINING, "invalidate"): (FREE, None, True),
}


def layout_with(state: SlotState) -> Layout:
    digest = None if state is FREE else A
    return Layout(Epoch("e"), 7, (Slot(state, digest, 3), Slot()))


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_in_every_state(state: SlotState, change: str) -> None:
    before = layout_with(state)
    if (state, change) not in TABLE:
        with pytest.raises(AssertionError):
            CHANGES[change](before)
        return
    after = CHANGES[change](before)
    new_state, digest, writes = TABLE[state, change]
    assert after[SLOT] == Slot(new_state, digest, 8 if writes else 3)
    assert (after.generation, after.epoch, after.slots[1]) == (8, before.epoch, before.slots[1])
    assert before == layout_with(state)
    after.check_integrity()


def test_a_mapping_is_current_until_a_write_begins_in_a_slot_it_uses() -> None:
    layout = Layout.empty(Epoch("e"), 2).begin_fill(SLOT, A).occupy(SLOT)
    made_at = layout.generation
    elsewhere = layout.begin_fill(SlotId(1), B).occupy(SlotId(1))
    freed = elsewhere.release(SLOT)
    assert elsewhere.is_current([SLOT], made_at)
    assert freed.is_current([SLOT], made_at)
    assert not freed.begin_fill(SLOT, B).is_current([SLOT], made_at)
    assert not elsewhere.invalidate(SLOT).is_current([SLOT], made_at)


def test_the_same_digest_back_in_the_same_slot_is_not_current() -> None:
    layout = Layout.empty(Epoch("e"), 1).begin_fill(SLOT, A).occupy(SLOT)
    made_at = layout.generation
    for digest in (B, A):
        layout = layout.begin_fill(SLOT, digest).occupy(SLOT)
    assert layout[SLOT].digest == A
    assert not layout.is_current([SLOT], made_at)


def test_advance_moves_the_generation_only() -> None:
    layout = layout_with(OCCUPIED)
    assert layout.advance() == Layout(layout.epoch, 8, layout.slots)


@pytest.mark.parametrize(
    "slots",
    [
        (Slot(OCCUPIED, A, 1), Slot(DRAINING, A, 1)),
        (Slot(OCCUPIED, None, 1),),
        (Slot(FREE, A, 1),),
        (Slot(OCCUPIED, A, 99),),
    ],
    ids=["one digest in two slots", "occupied without a digest", "free with a digest", "changed in the future"],
)
def test_check_integrity_sees_a_broken_table(slots: tuple[Slot, ...]) -> None:
    with pytest.raises(AssertionError):
        Layout(Epoch("e"), 7, slots).check_integrity()
