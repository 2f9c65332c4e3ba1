"""What tracing is told of work that has ended, and what it says of it."""

from __future__ import annotations

from typing import Protocol

from slotcar_sidecar.core.ids import Digest
from slotcar_sidecar.core.tally import Work

Exemplar = dict[str, str] | None
"""The ids of the trace and of the span that an observation belongs to, None unless they are kept."""


class Spans(Protocol):
    """Called on the owner's thread, in the context of the call that the work is for; never raises or waits."""

    def load_stage(self, stage: str, seconds: float, digest: Digest) -> Exemplar:
        """See Observer.load_stage."""

    def mapping_waited(self, seconds: float) -> Exemplar:
        """See Observer.mapping_waited."""

    def forward(self, plane: str, seconds: float, reason: str, work: Work, queue_seconds: float) -> Exemplar:
        """See Observer.forward."""
