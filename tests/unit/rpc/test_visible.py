"""What a limited client sees says nothing of names that it may not know."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TypeVar

import pytest
from slotcar_sidecar.core.access import Client, Names
from slotcar_sidecar.core.caller import CALLER, Caller
from slotcar_sidecar.core.desired import Cause
from slotcar_sidecar.core.errors import Reason
from slotcar_sidecar.core.events import Event, EventKind, EventLog
from slotcar_sidecar.core.ids import AdapterName
from slotcar_sidecar.core.reconcile import FileStatus
from slotcar_sidecar.rpc import visible

from tests.fakes.parts import Clock

T = TypeVar("T")


def seen_by(pattern: str, look: Callable[[], T]) -> T:
    """What a client of these names sees."""

    def looking() -> T:
        client = Client("ann", frozenset(), frozenset(), Names(frozenset({pattern})), frozenset())
        CALLER.set(Caller("ann", client))
        return look()

    return contextvars.copy_context().run(looking)


def event(kind: EventKind, reason: str) -> Event:
    events = EventLog(Clock())
    events.record(kind, 1, name=AdapterName("a/x"), reason=reason)
    (found,) = events.since(events.first_number)
    return found


@pytest.mark.parametrize("kind", [EventKind.EVICTED, EventKind.HOLD_RELEASED])
def test_a_reason_that_may_name_others_is_left_out(kind: EventKind) -> None:
    whole = event(kind, "unloaded as b/hidden")
    assert seen_by("*", lambda: visible.event(whole)) == whole
    seen = seen_by("a/*", lambda: visible.event(whole))
    assert seen is not None
    assert (seen.kind, str(seen.name), seen.reason) == (kind, "a/x", "")


def test_what_is_wrong_with_the_file_is_for_who_sees_all_of_it() -> None:
    file = FileStatus("/f.yaml", "", False, Cause(Reason.REQUEST_INVALID, "adapters[3].source is '/b/hidden'"))
    assert seen_by("*", lambda: visible.declaring_file(file)) == file
    seen = seen_by("a/*", lambda: visible.declaring_file(file))
    assert seen.cause == Cause(Reason.REQUEST_INVALID, "")
