"""What a session does after an error: a pure decision, without calls.

    call ──error──▶ next_step ──▶ REMAP    set the mapping again by the digests last reported, then repeat the call
                              ──▶ REOPEN   open a new session, then REMAP
                              ──▶ RAISE    the caller's to solve

A re-map never goes by a bare name, so that no token is computed half on old and half on new weights. UNAVAILABLE is
raised at once: only the engine knows whether to wait or to fail, and nothing is ever served as the base model.
"""

from __future__ import annotations

from enum import Enum

from slotcar_client.errors import LayoutStale, MappingNotFound, SessionNotFound, SlotcarError

MAX_STEPS = 8


class Step(Enum):
    """What comes next."""

    CALL = "call"
    REMAP = "remap"
    REOPEN = "reopen"
    RAISE = "raise"


_STEPS: dict[type[SlotcarError], Step] = {
    LayoutStale: Step.REMAP,
    MappingNotFound: Step.REMAP,
    SessionNotFound: Step.REOPEN,
}


def next_step(error: SlotcarError) -> Step:
    """What a session does after `error`, whichever of its calls met it."""
    return _STEPS.get(type(error), Step.RAISE)
