"""Sends each source to what reads it, by its scheme; what is not allowed is denied here, before any request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from slotcar_sidecar.core.errors import SlotcarError, SourceUnavailable
from slotcar_sidecar.store.base_model import BaseModel
from slotcar_sidecar.store.sources.fetch import Fetching, Place, RemoteFiles
from slotcar_sidecar.store.sources.files import read_adapter, versions_of
from slotcar_sidecar.store.sources.local import LocalSource
from slotcar_sidecar.store.sources.rules import LOCAL_SCHEMES, Rule, Target, parse_target, scheme_of
from slotcar_sidecar.store.weights import HostWeights

__all__ = ["Remote", "Sources"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Remote:
    """What the operator allowed beyond this machine, how to open it and within which bounds."""

    rules: tuple[Rule, ...]
    open: Callable[[Target], Place]
    fetching: Fetching


class Sources:
    """Implements core.ports.Source: local roots, and remote places. Safe for threads: it has no state."""

    def __init__(self, local: LocalSource, remote: Remote, max_bytes: int, base: BaseModel | None = None) -> None:
        self._local = local
        self._remote = remote
        self._max_bytes = max_bytes
        self._base = base

    def is_remote(self, uri: str) -> bool:
        return scheme_of(uri) not in LOCAL_SCHEMES

    def canonical(self, uri: str) -> str:
        """The one spelling of a path or URI that is allowed. Raises SourceDenied; asks nobody."""
        return str(parse_target(uri, self._remote.rules)) if self.is_remote(uri) else self._local.canonical(uri)

    def version(self, uri: str) -> Hashable:
        """ETags, commit, or times, with the sizes of the files. Raises as `read` does for what is not there."""
        if not self.is_remote(uri):
            return self._local.version(uri)
        return self._counted(uri, lambda files, _: tuple(versions_of(files).items()))

    def read(self, uri: str) -> HostWeights:
        """Reads and verifies the adapter; what changes meanwhile is read once more, from the beginning.

        Raises SourceDenied, SourceUnavailable, CapacityExceeded, AdapterInvalid or AdapterUnsupported.
        """
        if not self.is_remote(uri):
            return self._local.read(uri)
        try:
            return self._read_remote(uri)
        except SourceUnavailable as error:
            if error.facts.get("found") != "changed":
                raise
        self._remote.fetching.observer.fetch_retried(scheme_of(uri), "changed")
        return self._read_remote(uri)

    def _read_remote(self, uri: str) -> HostWeights:
        return self._counted(uri, lambda files, spelled: read_adapter(files, self._max_bytes, spelled, self._base))

    def _counted(self, uri: str, use: Callable[[RemoteFiles, str], T]) -> T:
        target = parse_target(uri, self._remote.rules)
        try:
            return use(RemoteFiles(self._remote.open(target), self._remote.fetching), str(target))
        except SlotcarError as error:
            kind = error.facts.get("found") if isinstance(error, SourceUnavailable) else None
            self._remote.fetching.observer.fetch_failed(target.scheme, str(kind or error.reason.value.lower()))
            raise
