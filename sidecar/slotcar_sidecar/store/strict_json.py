"""Reads one JSON object exactly: UTF-8, each key once, finite numbers."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from slotcar_sidecar.store.faults import invalid, shown


def parse_object(data: bytes, file: str, part: str = "") -> dict[str, Any]:
    """The object in `data`. Raises AdapterInvalid, naming `file`, if there is none or a key is there twice.

    `part`, such as "the header of ", says in messages which part of the file it is.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                raise invalid(
                    f"{part}{file} has the key {shown(name)} twice",
                    file=file,
                    field=name,
                    found="two values",
                    wanted="one",
                )
            result[name] = value
        return result

    def no_constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is not a JSON number")

    try:
        value = json.loads(data.decode(), object_pairs_hook=once, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(
            f"{part}{file} is not JSON: {shown(str(error))}", file=file, found=str(error), wanted="JSON"
        ) from error
    if not isinstance(value, dict):
        found = type(value).__name__
        raise invalid(f"{part}{file} holds a {found}, not an object", file=file, found=found, wanted="an object")
    return value
