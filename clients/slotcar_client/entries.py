"""From what a caller writes as the entries of a mapping to refs and row counts; nothing is inferred."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from slotcar_client.errors import RequestInvalid


class _Base(Enum):
    BASE = "BASE"

    def __repr__(self) -> str:
        return "BASE"

    __str__ = __repr__


BASE: Final = _Base.BASE

# "name", "name@sha256:…" or BASE.
Target = str | _Base
Entry = Target | tuple[Target, int]


@dataclass(frozen=True, slots=True)
class Entries:
    """What a mapping is asked for; `row_counts` is None when the caller gave no counts."""

    targets: tuple[Target, ...]
    row_counts: tuple[int, ...] | None


def parse_entries(entries: Iterable[Entry]) -> Entries:
    """Targets with their counts. Raises RequestInvalid, naming the entry, also when only some have a count."""
    if isinstance(entries, str | bytes):
        raise _invalid("entries", entries, "a list of entries")
    targets: list[Target] = []
    counts: list[int] = []
    for index, entry in enumerate(entries):
        field = f"entries[{index}]"
        if isinstance(entry, tuple):
            if len(entry) != 2:
                raise _invalid(field, entry, "(name or BASE, row count)")
            counts.append(checked_count(field, entry[1]))
            targets.append(_target(field, entry[0]))
        else:
            targets.append(_target(field, entry))
        if counts and len(counts) != len(targets):
            raise _invalid(field, entry, "a row count with every entry, or with none")
    return Entries(tuple(targets), tuple(counts) if counts else None)


def checked_count(field: str, count: object) -> int:
    """The count, or RequestInvalid: a row count is a whole number that is not negative."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise _invalid(field, count, "a row count of 0 or more")
    return count


def _target(field: str, target: object) -> Target:
    if target is BASE:
        return BASE
    if isinstance(target, str) and target:
        return target
    raise _invalid(field, target, "an adapter's name, name@digest, or BASE")


def _invalid(field: str, found: object, wanted: str) -> RequestInvalid:
    return RequestInvalid(f"{field} is {found!r}, wanted {wanted}", field=field, found=repr(found), wanted=wanted)
