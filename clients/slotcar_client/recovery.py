"""What a session does after an error: a pure decision, and how long it waits for a server that is away.

    call ──error──▶ next_step ──▶ REMAP    set the mapping again by the digests last reported, then repeat the call
                              ──▶ REOPEN   open a new session, take its holds again, then REMAP
                              ──▶ WAIT     let the server come back, then repeat the call
                              ──▶ RAISE    the caller's to solve

A re-map never goes by a bare name, so that no token is computed half on old and half on new weights. Whether a call
waits for a server that is away is the engine's setting; nothing is ever served as the base model instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

import grpc

from slotcar_client.effects import Plan, Wait
from slotcar_client.errors import (
    ClientClosed,
    LayoutStale,
    MappingNotFound,
    SessionNotFound,
    SlotcarError,
    SourceUnavailable,
    Unavailable,
)
from slotcar_client.options import SessionOptions

MAX_STEPS = 8
_FIRST_DELAY_SECONDS = 0.05
_LAST_DELAY_SECONDS = 1.0


class Step(Enum):
    """What comes next."""

    CALL = "call"
    REMAP = "remap"
    REOPEN = "reopen"
    WAIT = "wait"
    RAISE = "raise"


_STEPS: dict[type[SlotcarError], Step] = {
    LayoutStale: Step.REMAP,
    MappingNotFound: Step.REMAP,
    SessionNotFound: Step.REOPEN,
}


def next_step(error: SlotcarError, options: SessionOptions) -> Step:
    """What a session with these options does after `error`, whichever of its calls met it."""
    if is_away(error):
        return Step.WAIT if options.away == "wait" else Step.RAISE
    step = _STEPS.get(type(error), Step.RAISE)
    return Step.RAISE if step is Step.REOPEN and not options.owner else step


def is_away(error: SlotcarError) -> bool:
    """The server is gone or going; neither an adapter's source nor this side is."""
    return error.code is grpc.StatusCode.UNAVAILABLE and not isinstance(error, SourceUnavailable | ClientClosed)


def delays() -> Iterator[float]:
    """Seconds between tries, without end."""
    delay = _FIRST_DELAY_SECONDS
    while True:
        yield delay
        delay = min(2 * delay, _LAST_DELAY_SECONDS)


class Patience:
    """How long one call waits for the server to be back, at most `seconds` from its first failure on."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._delays = delays()
        self._began: float | None = None
        self.cause: str | None = None

    def delay(self, error: SlotcarError) -> float:
        """Seconds until the next try. Raises Unavailable when the time is over."""
        now = self._clock()
        if self._began is None:
            self._began, self.cause = now, error.reason
        waited = now - self._began
        if waited >= self._seconds:
            raise Unavailable(
                f"the server was away for {waited:.1f} s: {error.message}", waited_seconds=f"{waited:.1f}"
            ) from error
        return min(next(self._delays), self._seconds - waited)


def patiently(
    attempt: Callable[[], Plan[None]], options: SessionOptions, clock: Callable[[], float], seconds: float
) -> Plan[None]:
    """`attempt`, repeated while the server is away: where these options wait for it, and for `seconds` at most."""
    patience = Patience(min(seconds, options.away_seconds), clock)
    while True:
        try:
            return (yield from attempt())
        except SlotcarError as error:
            if next_step(error, options) is not Step.WAIT:
                raise
            yield Wait(patience.delay(error))
