"""A sequence with few different elements: work on each is done once, and expanding it costs no look-ups by value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")
U = TypeVar("U")


class Folded(Sequence[T], Generic[T]):
    """The elements table[i] for i in `indices`; `table` is in the order in which they come first, as a rule each once.

    A batch of 256 rows uses a few adapters: (sql, BASE, sql) is table (sql, BASE), indices (0, 1, 0).
    """

    __slots__ = ("indices", "table")

    def __init__(self, table: Iterable[T], indices: Iterable[int]) -> None:
        self.table = tuple(table)
        self.indices = tuple(indices)

    @classmethod
    def of(cls, elements: Iterable[T]) -> Folded[T]:
        """The same elements; `elements` itself if it is folded already."""
        if isinstance(elements, Folded):
            return elements
        places: dict[T, int] = {}
        indices = [places.setdefault(element, len(places)) for element in elements]
        return cls(places, indices)

    def map(self, change: Callable[[T], U]) -> Folded[U]:
        """What `change` makes of the elements; it is called once for each of the table."""
        return Folded(map(change, self.table), self.indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(map(self.table.__getitem__, self.indices[index]))
        return self.table[self.indices[index]]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[T]:
        return map(self.table.__getitem__, self.indices)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Folded):
            return NotImplemented
        same = self.indices == other.indices and self.table == other.table
        return same or (len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True)))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Folded{tuple(self)!r}"
