"""Pages of one snapshot: what a reader sees does not change under it between two pages."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from slotcar_sidecar.core.errors import RequestInvalid

T = TypeVar("T")

_MAX_SNAPSHOTS = 64
_LIFE_SECONDS = 60.0
_DEFAULT_PAGE = 100
_MAX_PAGE = 1000
_OFFSET = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """`extra` is what the snapshot carries beside its items; `next_token` is empty on the last page."""

    items: tuple[T, ...]
    extra: object
    next_token: str


@dataclass(frozen=True, slots=True)
class _Snapshot(Generic[T]):
    items: tuple[T, ...]
    extra: object
    expires_at: float


class Pager(Generic[T]):
    """Keeps the snapshots whose next page may still be asked for: the newest 64, for a minute."""

    def __init__(self, clock: Callable[[], float], new_id: Callable[[], str]) -> None:
        self._clock = clock
        self._new_id = new_id
        self._snapshots: OrderedDict[str, _Snapshot[T]] = OrderedDict()

    def first(self, items: tuple[T, ...], extra: object, page_size: int) -> Page[T]:
        """The first page of a new snapshot."""
        snapshot = _Snapshot(items, extra, self._clock() + _LIFE_SECONDS)
        return self._page(self._new_id(), snapshot, 0, page_size)

    def next(self, token: str, page_size: int) -> Page[T]:
        """The page that a token names. Raises RequestInvalid when the token is unknown or its minute is over."""
        name, _, offset = token.rpartition(":")
        snapshot = self._snapshots.get(name)
        if snapshot is None or not _OFFSET.fullmatch(offset) or snapshot.expires_at < self._clock():
            raise RequestInvalid("page_token", found=token[:100], wanted="a token of the last minute: list again")
        return self._page(name, snapshot, int(offset), page_size)

    def _page(self, name: str, snapshot: _Snapshot[T], offset: int, page_size: int) -> Page[T]:
        end = offset + min(page_size or _DEFAULT_PAGE, _MAX_PAGE)
        items = snapshot.items[offset:end]
        if end >= len(snapshot.items):
            return Page(items, snapshot.extra, "")
        now = self._clock()
        self._snapshots = OrderedDict((key, each) for key, each in self._snapshots.items() if each.expires_at >= now)
        self._snapshots[name] = snapshot
        while len(self._snapshots) > _MAX_SNAPSHOTS:
            self._snapshots.popitem(last=False)
        return Page(items, snapshot.extra, f"{name}:{end}")
