"""Lets other threads ask the cache's owner, and wait for its answer no longer than the server lives.

Invariant: nobody waits any more once `close` has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

__all__ = ["NoAnswer", "Owner"]

T = TypeVar("T")

_ANSWER_SECONDS = 5.0


class NoAnswer(Exception):
    """The owner is busy, or the server ends."""


class Owner:
    """The thread of the running event loop; make and close it there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: set[Future[Any]] = set()
        self._is_closed = False

    def ask(self, call: Callable[[], T]) -> T:
        """What `call` returns on the owner's thread. Raises NoAnswer, or what it raises."""
        answer: Future[T] = Future()

        def run() -> None:
            if self._is_closed or not answer.set_running_or_notify_cancel():
                answer.cancel()
                return
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        self._asked.add(answer)
        try:
            if self._is_closed:
                raise NoAnswer
            self._loop.call_soon_threadsafe(run)
            return answer.result(_ANSWER_SECONDS)
        except (TimeoutError, CancelledError) as error:
            answer.cancel()
            raise NoAnswer from error
        finally:
            self._asked.discard(answer)

    def close(self) -> None:
        """Answers nobody any more."""
        self._is_closed = True
        for answer in tuple(self._asked):
            answer.cancel()
