"""Counts the Forwards that wait for a loader: by design there is none, and the count is taken where one would wait.

A Forward's task knows that it is one, and so does whatever it awaits. The threads of rings and the engines of the
direct plane have no way to wait: they hold no lock, await nothing and share no thread with a loader.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor
from contextvars import ContextVar

from slotcar_sidecar.core.ports import Environment

_is_forward: ContextVar[bool] = ContextVar("is_forward", default=False)


class Waits:
    """Tells the observer of each wait."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """What the caller awaits inside, it awaits as a Forward."""
        token = _is_forward.set(True)
        try:
            yield
        finally:
            _is_forward.reset(token)

    def for_load(self) -> None:
        """The caller is about to wait for what a load does."""
        if _is_forward.get():
            self._environment.observer.forward_waited()

    def for_pool(self, pool: Executor) -> None:
        """The caller is about to wait for a job in the pool, behind what others gave it."""
        if pool in (self._environment.load_pool, self._environment.remote_pool):
            self.for_load()
