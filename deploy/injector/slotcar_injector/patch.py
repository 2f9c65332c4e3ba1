"""The JSON patch (RFC 6902) that makes one JSON value of another.

Insertions into lists are said as such, so that a patch stays short and says what it adds; any other change of a list
replaces it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slotcar_injector.shape import Json


def difference(before: Any, after: Any, path: str = "") -> Iterator[Json]:
    """The operations, in the order in which they are to be applied."""
    if type(before) is type(after) and before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_objects(before, after, path)
    elif isinstance(before, list) and isinstance(after, list) and _is_within(before, after):
        yield from _insertions(before, after, path)
    else:
        yield {"op": "replace", "path": path, "value": after}


def _of_objects(before: Json, after: Json, path: str) -> Iterator[Json]:
    for name in before:
        if name not in after:
            yield {"op": "remove", "path": f"{path}/{_escaped(name)}"}
    for name, value in after.items():
        at = f"{path}/{_escaped(name)}"
        if name not in before:
            yield {"op": "add", "path": at, "value": value}
        else:
            yield from difference(before[name], value, at)


def _is_within(before: list[Any], after: list[Any]) -> bool:
    """Whether the elements of `before`, which may have changed inside, are in `after` in their order."""
    return _matches(before, after) is not None


def _matches(before: list[Any], after: list[Any]) -> list[int | None] | None:
    """For each element of `after` the index of the one of `before` that it was, None for a new one."""
    found: list[int | None] = []
    at = 0
    for value in after:
        if at < len(before) and _name(value) == _name(before[at]):
            found.append(at)
            at += 1
        else:
            found.append(None)
    return found if at == len(before) else None


def _insertions(before: list[Any], after: list[Any], path: str) -> Iterator[Json]:
    for index, (value, origin) in enumerate(zip(after, _matches(before, after) or (), strict=True)):
        at = f"{path}/{index}"
        if origin is None:
            yield {"op": "add", "path": at, "value": value}
        else:
            yield from difference(before[origin], value, at)


def _name(value: Any) -> Any:
    """What an element of a list is known by: its name, or itself."""
    return value["name"] if isinstance(value, dict) and "name" in value else value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
