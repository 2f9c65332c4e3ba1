"""The audit stream: who did what to which adapter, session or server, and who was denied.

Invariant: what happened is told by the events of the cache, which are recorded where it happens; what the call adds is
who called. A load that outlives its caller keeps it.
"""

from __future__ import annotations

import logging

from slotcar_sidecar.core.call import CALL
from slotcar_sidecar.core.events import Event, EventKind
from slotcar_sidecar.ops import logs

_log = logging.getLogger("slotcar.audit")

_ACTIONS = {
    EventKind.LOADED: "load",
    EventKind.REPLACED: "replace",
    EventKind.UNLOADED: "unload",
    EventKind.EVICTED: "evict",
    EventKind.KEPT: "keep",
    EventKind.KEEP_RELEASED: "release",
    EventKind.SESSION_ENDED: "end-session",
}
_LOADS = {"LoadAdapter": "load", "LoadAdapterStream": "upload"}


def configure(handler: logging.Handler | None) -> None:
    """Sends the stream to `handler`, as JSON, or into the log. The log's level never holds it back."""
    _log.setLevel(logging.INFO)
    _log.propagate = handler is None
    _log.handlers[:] = []
    if handler is not None:
        handler.setFormatter(logs.formatter("json"))
        _log.addHandler(handler)


def audit(action: str, **fields: object) -> None:
    """Says that the caller of now did something, or was denied it; a field without a value is left out."""
    known = {"action": action, "peer": CALL.get().peer, **fields}
    _log.info("audit", extra={"fields": {key: value for key, value in known.items() if value not in (None, "")}})


def audit_event(event: Event) -> None:
    """The same for an event of the cache, if it is one that somebody did."""
    action = _action(event)
    if action:
        audit(
            action,
            adapter=str(event.name or ""),
            digest=str(event.digest or ""),
            source=event.source,
            session=event.session.short if event.session else "",
            outcome="refused" if event.kind is EventKind.REFUSED else "done",
            reason=event.reason,
            generation=event.generation,
        )


def _action(event: Event) -> str:
    """ "" for what nobody did, and for the refusal of what is no load."""
    if event.kind is EventKind.LOADED:
        return _LOADS.get(CALL.get().method, "load")
    if event.kind is EventKind.REFUSED and event.name is not None:
        return _LOADS.get(CALL.get().method, "load")
    return _ACTIONS.get(event.kind, "")
