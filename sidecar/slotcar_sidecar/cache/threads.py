"""Forwards that another thread than the owner's computes, without a hand-over on their way.

Invariant I8 as in `forwards`: the thread marks the slots, checks that they have not begun to change since the mapping
was made, computes, and checks again before the result leaves. It reads the owner's tables and changes none of them; it
tells the owner what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from slotcar_sidecar.cache.mappings import Mappings
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.calls import ForwardCall, check_forward
from slotcar_sidecar.core.errors import LayoutStale, ModelUnknown
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.layout import Layout
from slotcar_sidecar.core.mapping import Mapping
from slotcar_sidecar.core.marks import Mark
from slotcar_sidecar.core.ports import Batch
from slotcar_sidecar.core.session import Session
from slotcar_sidecar.core.tally import Work

# How the thread gives work to the owner: it runs soon, in the owner's thread.
Tell = Callable[[Callable[[], None]], object]


@dataclass(slots=True, eq=False)
class PreparedForward:
    """A Forward that can be computed again and again while its mapping is the session's; `told_at` is the last time at
    which the owner was told of its use."""

    session: Session
    mapping: Mapping
    batch: Batch
    work: Work
    told_at: float = float("-inf")

    @property
    def is_of_now(self) -> bool:
        """The session still has this mapping under its id."""
        return self.session.mappings.get(self.mapping.mapping_id) is self.mapping


class ThreadForwards:
    """The Forwards of one thread; made and ended by the owner, used by that thread alone."""

    def __init__(self, state: State, mappings: Mappings, tell: Tell) -> None:
        self._state = state
        self._mappings = mappings
        self._tell = tell
        self._tell_after_seconds = state.limits.mapping_idle_seconds / 4
        self._mark = Mark(partial(tell, state.marks.look))
        self._stale: set[SessionId] = set()
        self.last_at = state.now()
        state.marks.add(self._mark)

    def end(self) -> None:
        """The thread has ended. In the owner's thread."""
        self._state.marks.remove(self._mark)

    def prepare(self, call: ForwardCall) -> PreparedForward:
        """Checks a call and does its index work. Raises SlotcarError, as AdapterCache.forward does."""
        state = self._state
        session = state.sessions.get(call.session)
        session.check_rank(call.rank)
        mapping = session.mapping(call.mapping_id)
        mapping.check_generation(call.generation)
        rows = mapping.rows(call.row_counts)
        if state.model is None:
            raise ModelUnknown
        work = check_forward(call, state.model, state.limits)
        # The ranks and scales that it captures belong to the bytes of now: they are read as the bytes are.
        self._mark.begin(session, mapping.slots)
        try:
            mapping.check_current(state.layout)
            batch = state.device.prepare(rows, call.items, call.rank)
            mapping.check_current(state.layout)
        finally:
            self._mark.end()
        return PreparedForward(session, mapping, batch, work)

    def execute(self, prepared: PreparedForward) -> Layout:
        """Computes, and returns the layout at which the result is right. Raises LayoutStale; then use no result."""
        state, mapping = self._state, prepared.mapping
        self._mark.begin(prepared.session, mapping.slots)
        try:
            mapping.check_current(state.layout)
            state.device.execute(prepared.batch)
            layout = state.layout
            mapping.check_current(layout)
        finally:
            self._mark.end()
        self.last_at = now = state.now()
        if now - prepared.told_at >= self._tell_after_seconds:
            prepared.told_at = now
            self._tell_used(prepared, now)
        return layout

    def _tell_used(self, prepared: PreparedForward, now: float) -> None:
        """The owner learns that the mapping is used, unless it knows: every batch has prepared calls of its own."""
        used_at = prepared.session.last_used.get(prepared.mapping.mapping_id, float("-inf"))
        if now - used_at >= self._tell_after_seconds:
            self._tell(partial(self._used, prepared))

    def is_stale(self, session: SessionId, error: LayoutStale) -> None:
        """The owner learns that a Forward was refused; of more than one until it looks, it learns once."""
        if session not in self._stale:
            self._stale.add(session)
            self._tell(partial(self._record_stale, session, error))

    # In the owner's thread

    def reads_for(self, session: Session) -> bool:
        """Whether a Forward of the session is under way."""
        return self._mark.reader is session

    @property
    def is_reading(self) -> bool:
        """Whether a Forward is under way."""
        return self._mark.reader is not None

    def _used(self, prepared: PreparedForward) -> None:
        if prepared.session in self._state.sessions and prepared.is_of_now:
            self._mappings.used(prepared.session, prepared.mapping)
            self._state.residency.slots.uses.touch(prepared.mapping.slots)

    def _record_stale(self, session: SessionId, error: LayoutStale) -> None:
        state = self._state
        self._stale.discard(session)
        state.events.record(EventKind.FORWARD_STALE, state.layout.generation, session=session, reason=error.message)
        state.publish()
