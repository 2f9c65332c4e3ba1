"""Gets files over a network into private memory: retried, resumed where it stopped, bounded in time and rate.

Invariant: every byte of a file is of the version that was looked up before, or the fetch is refused. Waits end at once
when the server shuts down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from slotcar_sidecar.core.errors import ShuttingDown, SlotcarError, SourceUnavailable
from slotcar_sidecar.store.faults import PICKLE_FILE, WEIGHTS_FILE, invalid, unsupported
from slotcar_sidecar.store.memory import private_memory

__all__ = ["Broken", "Changed", "Fetching", "Place", "RemoteFile", "RemoteFiles", "Stop"]

MAX_TRIES = 6
_FIRST_WAIT_SECONDS = 0.2
_MOST_WAIT_SECONDS = 10.0
T = TypeVar("T")


class Broken(Exception):
    """A request that failed in a way that may pass; `kind` is one word for metrics."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class Changed(Exception):
    """The file is at another version than the one that was asked for."""


class RemoteFile(NamedTuple):
    """Size, and what the place says that identifies the bytes: an ETag with a version, or a commit."""

    bytes: int
    version: str


class Place(Protocol):
    """A remote folder. Calls block, raise Broken for what may pass, and SlotcarError for what will not."""

    uri: str
    scheme: str

    def look(self, name: str) -> RemoteFile | None:
        """Size and version of a file as it is now; None when there is none."""

    def stream(self, name: str, file: RemoteFile, start: int) -> AbstractContextManager[Iterator[bytes]]:
        """The bytes from `start` on, in parts of at most a few MiB. Raises Changed."""


class Stop(Protocol):
    """Set when the server shuts down."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


class Observer(Protocol):
    """Is told of progress, by scheme alone."""

    def fetched(self, scheme: str, count: int) -> None: ...

    def fetch_retried(self, scheme: str, reason: str) -> None: ...

    def fetch_failed(self, scheme: str, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Fetching:
    """Bounds of one adapter's fetch, and what the process gives for it; `random` is uniform in [0, 1)."""

    seconds: float
    bytes_per_second: int
    clock: Callable[[], float]
    random: Callable[[], float]
    stop: Stop
    observer: Observer


class RemoteFiles:
    """The files of a place, as Files, for one read: its deadline begins now."""

    def __init__(self, place: Place, fetching: Fetching) -> None:
        self._place = place
        self._fetching = fetching
        self._start = fetching.clock()
        self._bytes = 0

    def version(self, name: str) -> RemoteFile | None:
        return self._retried(lambda: self._place.look(name))

    def read(self, name: str, version: RemoteFile) -> memoryview:
        """The whole file. Only what is lacking is asked for again."""
        memory, have = private_memory(version.bytes), 0

        def resume() -> None:
            nonlocal have
            with self._place.stream(name, version, have) as parts:
                for part in parts:
                    if have + len(part) > version.bytes:
                        raise Changed
                    memory[have : have + len(part)] = part
                    have += len(part)
                    self._count(len(part))
            if have < version.bytes:
                raise Broken("truncated", f"{name} ended after {have} of {version.bytes} bytes")

        if version.bytes:
            self._retried(resume, lambda: have)
        return memory

    def missing(self, name: str) -> SlotcarError:
        if name == WEIGHTS_FILE and self.version(PICKLE_FILE) is not None:
            return unsupported(
                f"{self._place.uri} has {PICKLE_FILE}, a pickle, which is never read: convert it to {WEIGHTS_FILE}",
                file=PICKLE_FILE,
                found=PICKLE_FILE,
                wanted=WEIGHTS_FILE,
            )
        return invalid(f"{self._place.uri} has no {name}", file=name, found="no such file", wanted=name)

    def changed(self) -> SourceUnavailable:
        return _unavailable(self._place, "changed", "it changed while it was read")

    def _retried(self, request: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """What `request` gives; tried again while there is time, and tries left since it last got further."""
        tries, reached, fetching = 0, progress(), self._fetching
        while True:
            self._check_time()
            try:
                return request()
            except Changed as error:
                raise self.changed() from error
            except Broken as error:
                tries = 1 if progress() > reached else tries + 1
                reached = progress()
                if tries >= MAX_TRIES:
                    raise _unavailable(self._place, error.kind, f"{error}, at {tries} tries") from None
                fetching.observer.fetch_retried(self._place.scheme, error.kind)
                self._wait(min(_MOST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**tries) * (0.5 + fetching.random() / 2))

    def _count(self, size: int) -> None:
        """Waits as long as the rate asks for."""
        fetching = self._fetching
        self._bytes += size
        fetching.observer.fetched(self._place.scheme, size)
        self._check_time()
        early = self._bytes / fetching.bytes_per_second - (fetching.clock() - self._start)
        if early > 0:
            self._wait(early)

    def _wait(self, seconds: float) -> None:
        left = self._start + self._fetching.seconds - self._fetching.clock()
        self._fetching.stop.wait(max(0.0, min(seconds, left)))
        self._check_time()

    def _check_time(self) -> None:
        if self._fetching.stop.is_set():
            raise ShuttingDown
        if self._fetching.clock() - self._start >= self._fetching.seconds:
            what = f"it took longer than --fetch-seconds {self._fetching.seconds:g}"
            raise _unavailable(self._place, "timeout", what)


def _unavailable(place: Place, kind: str, what: str) -> SourceUnavailable:
    return SourceUnavailable(f"cannot read {place.uri}: {what}", found=kind, wanted="an adapter that stays as it is")
