"""Which RPC runs now, and in which trace: what is written about it reads that here.

Invariant: CALL is set once for an RPC, in the RPC's own context; what outlives its caller keeps it, as tasks do.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """`method` as "LoadAdapter", `peer` as gRPC names it; `trace` and `span` are hexadecimal ids.

    `trace` is the caller's even where this server keeps no span of the RPC; `span` is "" then.
    """

    method: str = ""
    peer: str = ""
    trace: str = ""
    span: str = ""

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What a metric says of an observation in a trace that is kept."""
        return {"trace_id": self.trace, "span_id": self.span} if self.span else None


CALL: ContextVar[Call] = ContextVar("call", default=Call())  # noqa: B039
