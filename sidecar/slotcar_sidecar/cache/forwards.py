"""The computation. Invariant I8: no row is computed with a digest other than the one its mapping reported.

A Forward marks the slots it reads, checks that they have not begun to change since its mapping was made, computes, and
checks again before the result leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slotcar_sidecar.cache.mappings import Mappings
from slotcar_sidecar.cache.state import State
from slotcar_sidecar.core.calls import Computed, ForwardCall, check_forward
from slotcar_sidecar.core.errors import LayoutStale, ModelUnknown, SlotcarError
from slotcar_sidecar.core.events import EventKind
from slotcar_sidecar.core.ids import SessionId
from slotcar_sidecar.core.ports import Batch
from slotcar_sidecar.core.tally import NO_WORK
from slotcar_sidecar.core.tensor import Matrix


class Forwards:
    """Forwards under way; each session knows its own."""

    def __init__(self, state: State, mappings: Mappings) -> None:
        self._state = state
        self._mappings = mappings
        self.in_flight = 0
        self.last_at = state.now()

    async def forward(self, call: ForwardCall) -> Computed:
        """Computes a LoRA for rows of a mapping. The slots stay marked until the kernels end, caller or not."""
        session = self._state.sessions.peek(call.session)
        return await self._state.outliving(self._observed(call), session.running if session else None)

    async def fence(self, session_id: SessionId) -> None:
        """Returns when every Forward of the session that came before has ended, answered or not."""
        session, ended = self._state.sessions.get(session_id), asyncio.Event()
        running = tuple(session.running)
        if running:
            await asyncio.wait(running)
        self._state.marks.when_ended(session, ended.set)
        await ended.wait()

    async def _observed(self, call: ForwardCall) -> Computed:
        state = self._state
        start, reason, work, queue_seconds = state.now(), "INTERNAL", NO_WORK, 0.0
        self.in_flight += 1
        try:
            with state.waits.forward():
                computed = await self._forward(call)
            reason, work, queue_seconds = "OK", computed.work, computed.queue_seconds
            return computed
        except SlotcarError as error:
            reason = str(error.reason)
            if isinstance(error, LayoutStale):
                generation, message = state.layout.generation, error.message
                state.events.record(EventKind.FORWARD_STALE, generation, session=call.session, reason=message)
                state.publish()
            raise
        finally:
            self.in_flight -= 1
            self.last_at = state.now()
            seconds = self.last_at - start
            state.environment.observer.forward(call.plane, seconds, reason, work, queue_seconds)

    async def _forward(self, call: ForwardCall) -> Computed:
        state, start = self._state, self._state.now()
        session = state.sessions.get(call.session)
        session.check_rank(call.rank)
        mapping = session.mapping(call.mapping_id)
        mapping.check_generation(call.generation)
        rows = mapping.rows(call.row_counts)
        if state.model is None:
            raise ModelUnknown
        work = check_forward(call, state.model, state.limits)
        with state.marks.reading(mapping.slots):
            mapping.check_current(state.layout)
            self._mappings.used(session, mapping)
            state.residency.slots.uses.touch(mapping.slots)
            batch = state.device.prepare(rows, call.items, call.rank)
            outputs, began = await state.run(state.environment.compute_pool, self._execute, batch)
            mapping.check_current(state.layout)
        if session.mappings.get(call.mapping_id) is mapping:
            session.last_used[call.mapping_id] = state.now()
        return Computed(outputs, mapping.digests, state.layout, began - start, state.now() - began, work)

    def _execute(self, batch: Batch) -> tuple[Sequence[Matrix], float]:
        """In the pool: the outputs, and when that began."""
        began = self._state.now()
        return self._state.device.execute(batch), began
