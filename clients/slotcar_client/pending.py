"""A Forward whose result is not wanted yet.

Invariant: its outcome, once there is one, stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from slotcar_client.effects import Advance, Pause, Plan

if TYPE_CHECKING:
    import torch

# Runs a plan until it pauses; raises StopIteration with its result at its end.
Steps = Callable[[Plan[Any], Advance], Pause]


class PendingForward:
    """Made by `forward_async`. Safe to use from threads."""

    def __init__(self, steps: Steps, is_done: Callable[[Pause], bool], plan: Plan[dict[str, torch.Tensor]]) -> None:
        """Runs the plan until it pauses or ends; `is_done` tells whether it could go on without a wait."""
        self._steps = steps
        self._is_done = is_done
        self._plan: Plan[dict[str, torch.Tensor]] | None = plan
        self._pause: Pause | None = None
        self._outputs: dict[str, torch.Tensor] = {}
        self._error: BaseException | None = None
        # Reentrant for a signal handler that looks at what its thread waits for.
        self._lock = threading.RLock()
        self._go_on(plan, partial(next, plan))

    def done(self) -> bool:
        """Whether `result` would return, or raise, without a wait for the answer."""
        pause = self._pause
        return pause is None or self._is_done(pause)

    def result(self) -> dict[str, torch.Tensor]:
        """What `forward` would return, or raise; waits for it. The same each time."""
        with self._lock:
            if self._plan is not None:
                self._go_on(self._plan, partial(self._plan.send, None))
        if self._error is not None:
            raise self._error
        return self._outputs

    def _go_on(self, plan: Plan[dict[str, torch.Tensor]], advance: Advance) -> None:
        self._plan = self._pause = None
        try:
            self._pause = self._steps(plan, advance)
            self._plan = plan
        except StopIteration as end:
            self._outputs = end.value
        except Exception as error:
            self._error = error
        except BaseException as error:
            self._error = error
            raise
