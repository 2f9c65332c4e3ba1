"""A bounded look at the declared set has first what is wrong."""

from __future__ import annotations

from slotcar_sidecar.core.desired import (
    Cause,
    DesiredSet,
    EntryState,
    Load,
    Malformed,
    Refused,
    Seen,
    Want,
    Wanted,
)
from slotcar_sidecar.core.errors import Reason
from slotcar_sidecar.core.ids import AdapterName
from slotcar_sidecar.core.reconcile import Reconciliation

CAUSE = Cause(Reason.SOURCE_UNAVAILABLE, "gone")
NAMES = [AdapterName(name) for name in ("absent", "failing", "waiting")]


class Nothing:
    """A world without adapters."""

    now = 10.0
    model_known = True

    def seen(self, name: AdapterName) -> Seen | None:
        return None

    def room(self, wanted: Wanted) -> int:
        return 1


def table() -> Reconciliation:
    """One entry of each kind that a look tells apart."""
    table = Reconciliation(lambda _: None)
    absent, failing, waiting = NAMES
    wants = (Want(absent, Wanted.ABSENT), Want(failing, source="/f"), Want(waiting, source="/w"))
    table.declare(DesiredSet(wants, (Malformed("adapters[3]", "", CAUSE),)), now=0.0)
    table.judge(NAMES, Nothing())
    load = Load(wants[1])
    table.begin(load)
    table.end(load, Refused(CAUSE), now=10.0)
    return table


def test_what_is_malformed_or_failed_comes_first() -> None:
    found = [(entry.name or entry.place, entry.state) for entry in table().worst(10.0, 9)]
    assert found == [
        ("adapters[3]", EntryState.INVALID),
        ("failing", EntryState.FAILED),
        ("waiting", EntryState.PENDING),
        ("absent", EntryState.ABSENT),
    ]


def test_it_is_bounded_and_says_of_each_what_status_says() -> None:
    every = table().status(10.0)
    for most in range(5):
        some = table().worst(10.0, most)
        assert len(some) == most
        assert set(some) <= set(every)
