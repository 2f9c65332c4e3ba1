"""A Forward whose result is not wanted yet.

Invariant: its outcome, once there is one, stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from slotcar_client.effects import Forward

if TYPE_CHECKING:
    import torch

    from slotcar_client.transports.base import Sent

    Outputs: TypeAlias = dict[str, torch.Tensor]


class Ahead(NamedTuple):
    """A Forward that was sent, and what is known of it."""

    first: Forward
    sent: Sent


class PendingForward:
    """Made by `forward_async`. Safe to use from threads."""

    def __init__(
        self,
        send: Callable[[], Ahead | Outputs],
        collect: Callable[[Ahead], Outputs],
        is_done: Callable[[Ahead], bool],
    ) -> None:
        """`send` sends it ahead or computes it at once. What it or `collect` raises is the outcome."""
        self._collect = collect
        self._is_done = is_done
        self._ahead: Ahead | None = None
        self._outputs: Outputs = {}
        self._error: BaseException | None = None
        # Reentrant for a signal handler that looks at what its thread waits for.
        self._lock = threading.RLock()
        self._take(send)

    def done(self) -> bool:
        """Whether `result` would return, or raise, without a wait for the answer."""
        ahead = self._ahead
        return ahead is None or self._is_done(ahead)

    def result(self) -> Outputs:
        """What `forward` would return, or raise; waits for it. The same each time."""
        with self._lock:
            if (ahead := self._ahead) is not None:
                self._take(partial(self._collect, ahead))
        if self._error is not None:
            raise self._error
        return self._outputs

    def _take(self, attempt: Callable[[], Ahead | Outputs]) -> None:
        ahead = None
        try:
            came = attempt()
            if isinstance(came, Ahead):
                ahead = came
            else:
                self._outputs = came
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._ahead = ahead
