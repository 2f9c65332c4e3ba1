"""What a fetch is given by the process: who counts, and a clock that stops it."""

from __future__ import annotations

import threading


class Counts:
    """The observer: what was fetched, retried and failed."""

    def __init__(self) -> None:
        self.bytes, self.retried, self.failed = 0, list[str](), list[str]()

    def fetched(self, scheme: str, count: int) -> None:
        self.bytes += count

    def fetch_retried(self, scheme: str, reason: str) -> None:
        self.retried.append(reason)

    def fetch_failed(self, scheme: str, reason: str) -> None:
        self.failed.append(reason)


class Clock:
    """Time that only waits move; also the Stop."""

    def __init__(self) -> None:
        self.now, self.stopped = 0.0, threading.Event()

    def __call__(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return self.stopped.is_set()

    def wait(self, timeout: float) -> bool:
        self.now += timeout
        return self.is_set()
