"""Says on which cores processes run: where two ends lie decides what a wake-up costs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["placed"]


@contextlib.contextmanager
def placed(cores: Collection[int], *pids: int) -> Iterator[None]:
    """All threads of this process and of `pids` run on `cores`, and so do processes that are started meanwhile."""
    before = os.sched_getaffinity(0)
    _place(cores, os.getpid(), *pids)
    try:
        yield
    finally:
        _place(before, os.getpid(), *pids)


def _place(cores: Collection[int], *pids: int) -> None:
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
                os.sched_setaffinity(int(task.name), cores)
