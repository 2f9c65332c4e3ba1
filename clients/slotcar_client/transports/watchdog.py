"""A deadline for calls that block without one, at no cost per call: one thread that wakes once per deadline.

gRPC's answer iterator has no timeout of its own, and a timer per call would cost more than a small call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType


class Watch:
    """One watched call, as a context; `expired` says that it was cancelled because its time was over."""

    def __init__(self, watchdog: Watchdog, cancel: Callable[[], None]) -> None:
        self._watchdog = watchdog
        self.cancel = cancel
        self.expired = False
        self.deadline = 0.0

    def __enter__(self) -> Watch:
        self._watchdog.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.end()


class Watchdog:
    """Cancels a call that is still under way `timeout_seconds` after it began. One call at a time."""

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._current: Watch | None = None
        self._busy = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, cancel: Callable[[], None]) -> Watch:
        """A context for one call, which `cancel` ends."""
        return Watch(self, cancel)

    def begin(self, watch: Watch) -> None:
        watch.deadline = self._clock() + self._timeout_seconds
        self._current = watch
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="slotcar-watchdog", daemon=True)
            self._thread.start()
        if not self._busy.is_set():
            self._busy.set()

    def end(self) -> None:
        self._current = None

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        self._busy.set()

    def _run(self) -> None:
        """Waits for a call, sleeps until its deadline, then looks whether the call of now is the same."""
        while self._busy.wait() and not self._closed.is_set():
            # Cleared before the look: a call that begins after the look sets it again.
            self._busy.clear()
            while (watch := self._current) is not None and not self._closed.is_set():
                remaining = watch.deadline - self._clock()
                if remaining > 0:
                    self._closed.wait(remaining)
                elif watch is self._current:
                    watch.expired = True
                    watch.cancel()
                    break
