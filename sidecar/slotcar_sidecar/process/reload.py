"""Puts changed files in force while the server runs: on SIGHUP, and when the files of a thing have changed.

Invariant: what cannot be put in force leaves what was in force, whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slotcar_sidecar.config import ConfigError
from slotcar_sidecar.core.errors import SlotcarError
from slotcar_sidecar.process.sockets import StartError
from slotcar_sidecar.sync.file import identity
from slotcar_sidecar.sync.looks import looks

__all__ = ["ReloadObserver", "Reloads"]

_log = logging.getLogger("slotcar")

_POLL_SECONDS = 10.0
# What is wrong with a file; all else is a fault of our own, and its place is in the log.
_EXPECTED = (SlotcarError, StartError, ConfigError, OSError)


class ReloadObserver(Protocol):
    """Who counts reloads. Called on the event loop's thread; never raises."""

    def reloaded(self, what: str, *, in_force: bool) -> None:
        """What the files of `what` say is in force now, or cannot be and is not."""

    def reloads(self, what: str) -> None:
        """There is a thing of this name."""


@dataclass(slots=True)
class _Thing:
    what: str
    files: Callable[[], Iterable[Path]]
    apply: Callable[[], None]
    seen: Hashable = None
    failure: str = ""

    def identity(self) -> Hashable:
        """What changes when a file does, or when there are others."""
        return tuple((path, identity(path)) for path in self.files())


class Reloads:
    """What can be put in force anew, by name. Runs on the event loop's thread."""

    def __init__(self, observer: ReloadObserver, poll_seconds: float = _POLL_SECONDS) -> None:
        self._observer = observer
        self._poll_seconds = poll_seconds
        self._things: list[_Thing] = []

    def add(self, what: str, files: Callable[[], Iterable[Path]], apply: Callable[[], None]) -> None:
        """`apply` reads the files again and puts them in force, or raises and leaves what was; it is called on the
        event loop's thread. `files` names what to watch now, and may name nothing.

        Add a thing before its files are read first, so that no change between is missed.
        """
        thing = _Thing(what, files, apply)
        thing.seen = thing.identity()
        self._things.append(thing)
        self._observer.reloads(what)

    def not_in_force(self) -> dict[str, str]:
        """Why each thing is not what its files say, of those that are not."""
        return {thing.what: thing.failure for thing in self._things if thing.failure}

    def all(self) -> None:
        """Puts everything in force anew, changed or not."""
        _log.info("reloading", extra={"fields": {"what": " ".join(thing.what for thing in self._things)}})
        for thing in self._things:
            thing.failure = ""
            self._apply(thing, thing.identity())

    async def run(self) -> None:
        """Goes on until it is cancelled. What failed is tried again at each look, as files may be written in parts."""
        async with contextlib.aclosing(looks(self._files, self._poll_seconds, asyncio.Event())) as moments:
            async for _ in moments:
                for thing in self._things:
                    found = await asyncio.to_thread(thing.identity)
                    if thing.failure or found != thing.seen:
                        self._apply(thing, found)

    def _files(self) -> set[Path]:
        return {path for thing in self._things for path in thing.files()}

    def _apply(self, thing: _Thing, seen: Hashable) -> None:
        """The same failure again is not told again."""
        thing.seen = seen
        try:
            thing.apply()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            if failure == thing.failure:
                return
            thing.failure = failure
            self._observer.reloaded(thing.what, in_force=False)
            fields = {"what": thing.what, "reason": str(error)}
            fault = None if isinstance(error, _EXPECTED) else error
            _log.error("cannot reload; what was in force stays", extra={"fields": fields}, exc_info=fault)
        else:
            thing.failure = ""
            self._observer.reloaded(thing.what, in_force=True)
            _log.info("reloaded", extra={"fields": {"what": thing.what}})
