"""What of the server's state the caller may see: nothing of adapters that it may not name, nor of others' sessions.

Digests are no secret: every layout has those of all slots, and none is of use without a name that has it.
"""

from __future__ import annotations

import dataclasses

from slotcar_sidecar.core.caller import CALLER
from slotcar_sidecar.core.calls import Capacity
from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.core.reconcile import FileStatus
from slotcar_sidecar.core.session import Session

# Their reasons may have the name that took the slot, or the one that the hold was taken by.
_NAMING_OTHERS = frozenset({EventKind.EVICTED, EventKind.HOLD_RELEASED})


def event(event: Event) -> Event | None:
    """The event, without a reason that names others; None for one that is hidden."""
    caller = CALLER.get()
    if not caller.is_limited:
        return event
    if event.name is None:
        return event if event.digest is not None else None
    if not caller.sees(event.name):
        return None
    return dataclasses.replace(event, reason="") if event.kind in _NAMING_OTHERS else event


def declaring_file(file: FileStatus) -> FileStatus:
    """The file, without what is wrong in it: that has the text of any entry."""
    if file.cause is None or not CALLER.get().is_limited:
        return file
    return dataclasses.replace(file, cause=dataclasses.replace(file.cause, message=""))


def session(session: Session) -> bool:
    """Whether the caller sees it: its own do all."""
    caller = CALLER.get()
    return not caller.is_limited or session.terms.owner == caller.name


def capacity(capacity: Capacity) -> Capacity:
    """How full the server is, without the failures of hidden names."""
    caller = CALLER.get()
    seen = {ref: why for ref, why in capacity.restore_failures.items() if caller.sees(ref.name)}
    return dataclasses.replace(capacity, restore_failures=seen)
