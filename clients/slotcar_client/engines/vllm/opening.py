"""How an engine comes to its session: waits for the sidecar, brings its model or takes another, joins as a rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from slotcar.v1 import model_pb2

from slotcar_client.client import Client
from slotcar_client.engines.vllm.layers import check_serves
from slotcar_client.engines.vllm.settings import Settings
from slotcar_client.errors import ModelMismatch, SlotcarError
from slotcar_client.options import MAX_GRACE_SECONDS
from slotcar_client.recovery import Patience, is_away
from slotcar_client.session import RankSession, Session

T = TypeVar("T")

NAME = "vllm"
_GRACE_SECONDS = 30.0

_log = logging.getLogger(__name__)


def waited(attempt: Callable[[], T], seconds: float) -> T:
    """What `attempt` gives, repeated while the sidecar is away. Raises Unavailable when the time is over."""
    patience = Patience(seconds, time.monotonic)
    while True:
        try:
            return attempt()
        except SlotcarError as error:
            if not is_away(error):
                raise
            if patience.cause is None:
                _log.warning("the sidecar is away, waiting up to %g s: %s", seconds, error.message)
            time.sleep(patience.delay(error))


def opened(client: Client, spec: model_pb2.ModelSpec, settings: Settings, ranks: int) -> Session:
    """The engine's own session.

    Where the sidecar has a model already, with other sites than `spec`, the engine takes it if it computes all of them.
    Raises ModelMismatch, Unavailable after `wait_seconds`, or why the sidecar refuses the session.
    """
    return waited(lambda: _opened(client, spec, settings, ranks), settings.wait_seconds)


def _opened(client: Client, spec: model_pb2.ModelSpec, settings: Settings, ranks: int) -> Session:
    try:
        return _session(client, spec, settings, ranks)
    except ModelMismatch:
        session = _session(client, None, settings, ranks)
    theirs = session.model_spec
    try:
        check_serves(spec, theirs if theirs is not None else spec)
    except ModelMismatch:
        session.close()
        raise
    return session


def _session(client: Client, spec: model_pb2.ModelSpec | None, settings: Settings, ranks: int) -> Session:
    return client.session(
        NAME,
        model_spec=spec,
        ranks=ranks,
        reserved_slots=settings.reserved_slots,
        transport=settings.plane,
        grace_seconds=min(max(_GRACE_SECONDS, settings.step_wait_seconds), MAX_GRACE_SECONDS),
    )


def joined(client: Client, session_id: str, settings: Settings, rank: int) -> RankSession:
    """This process's place in the session that rank 0 opened."""
    return waited(lambda: client.join(session_id, rank, transport=settings.plane), settings.wait_seconds)
