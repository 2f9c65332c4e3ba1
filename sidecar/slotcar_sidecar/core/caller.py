"""Who makes the call that runs now: what acts on a call, or writes about it, reads it here.

Invariant: CALLER is set once for a call, in the call's own context, before anything of the request has an effect.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from slotcar_sidecar.core.access import Client


@dataclass(frozen=True, slots=True)
class Caller:
    """A client by the policy's name for it, with its rights; "" and None where there is no policy."""

    name: str = ""
    rights: Client | None = None

    @property
    def is_limited(self) -> bool:
        """There are adapters that it may not name, and so does not see."""
        return self.rights is not None and not self.rights.adapters.are_all

    def may_use(self, plane: str) -> bool:
        return self.rights is None or plane in self.rights.planes

    def sees(self, adapter: object) -> bool:
        """Whether it may know of the adapter of this name."""
        return self.rights is None or adapter in self.rights.adapters


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039
